// Runs a writer one instruction at a time, and keeps what its file holds after each that changed it: all that a SIGKILL can leave,
// since a mapped file outlives its writer as it is.
#pragma once

#include <signal.h>
#include <sys/ptrace.h>
#include <sys/wait.h>

#include <cerrno>

#include "script.hpp"

namespace check {

constexpr int NO_PTRACE = 3;  // exit status

// Into `out`, for each state: instructions run, lines begun, lines done, the number of words that changed; their offsets and values.
template <class Player>
int run_stepped(const char* path, const char* script, const char* out) {
  MappedFile file(path);
  const std::vector<Line> lines = read_script(script);
  auto* progress = reinterpret_cast<uint64_t*>(map_shared(4096));
  Player player(file.map);
  const pid_t writer = fork();
  if (writer == 0) {
    if (ptrace(PTRACE_TRACEME, 0, nullptr, nullptr)) _exit(NO_PTRACE);
    raise(SIGSTOP);
    for (uint64_t i = 0; i < lines.size(); ++i) {
      publish(progress, i + 1);
      player.play(lines[i]);
      publish(progress + 1, i + 1);
    }
    _exit(0);
  }
  int status = 0;
  waitpid(writer, &status, 0);
  if (WIFEXITED(status) && WEXITSTATUS(status) == NO_PTRACE) return NO_PTRACE;
  if (!WIFSTOPPED(status) || ptrace(PTRACE_SETOPTIONS, writer, nullptr, PTRACE_O_EXITKILL)) fail("the writer cannot be traced");
  std::FILE* states = std::fopen(out, "wb");
  if (!states) fail("%s cannot be written", out);
  std::vector<uint64_t> former(word_at(file.map, 0), word_at(file.map, file.size)), changed;
  uint64_t steps = 0, kept = 0, begun = 0, done = 0;
  for (;; ++steps) {
    if (ptrace(PTRACE_SINGLESTEP, writer, nullptr, nullptr)) fail("the writer cannot be stepped: errno %d", errno);
    if (waitpid(writer, &status, 0) != writer) fail("the writer is gone");
    if (!WIFSTOPPED(status)) break;
    if (WSTOPSIG(status) != SIGTRAP) fail("the writer got signal %d after %llu instructions", WSTOPSIG(status), wide(steps));
    const bool written = std::memcmp(file.map, former.data(), file.size);
    if (!written && begun == progress[0] && done == progress[1]) continue;
    begun = progress[0];
    done = progress[1];
    changed.clear();
    for (uint64_t i = 0; written && i < former.size(); ++i) {
      const uint64_t word = *word_at(file.map, i * 8);
      if (word == former[i]) continue;
      former[i] = word;
      changed.insert(changed.end(), {i * 8, word});
    }
    const uint64_t head[] = {steps + 1, begun, done, changed.size() / 2};
    if (std::fwrite(head, sizeof head, 1, states) != 1 || std::fwrite(changed.data(), 8, changed.size(), states) != changed.size())
      fail("%s cannot be written", out);
    player.look(lines);
    ++kept;
  }
  if (std::fclose(states) || !WIFEXITED(status) || WEXITSTATUS(status)) fail("the writer ended with %x", static_cast<unsigned>(status));
  std::printf("%llu instructions, %llu states\n", wide(steps), wide(kept));
  return 0;
}

template <class Player>
int run_script(const char* path, const char* script) {
  MappedFile file(path);
  Player player(file.map);
  for (const Line& line : read_script(script)) player.play(line);
  return 0;
}

}  // namespace check
