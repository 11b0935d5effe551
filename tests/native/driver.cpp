// The native code's own test: no torch, no Python. native_check.py builds and runs it.
//
//   driver crowd MILLISECONDS            many threads write, others read
//   driver meet TIMES                    ranks read each other's boards, wake each other and verify, as threads and as processes
//   driver write FILE THREADS            many threads write into a file until they are killed
//   driver play KIND FILE SCRIPT         do what a text says
//   driver step KIND FILE SCRIPT STATES  the same, one instruction at a time; exit status 3 where ptrace is not permitted
#include "crowd.hpp"
#include "meeting.hpp"
#include "stepping.hpp"
#include "verifying.hpp"

int main(int count, char** words) {
  using namespace check;
  const std::string verb = count > 1 ? words[1] : "", kind = count > 2 ? words[2] : "";
  if (verb == "crowd" && count == 3) {
    for (const bool paced : {true, false}) run_crowd(std::strtoull(words[2], nullptr, 10) / 2, 4, paced);
    return 0;
  }
  if (verb == "meet" && count == 3) {
    const uint64_t times = std::strtoull(words[2], nullptr, 10);
    for (const bool processes : {false, true}) {
      run_meeting(4, times, processes);
      run_verifying(times, processes);
    }
    return 0;
  }
  if (verb == "write" && count == 4) {
    write_for_ever(words[2], std::strtoull(words[3], nullptr, 10));
    return 0;
  }
  if (verb == "play" && count == 5 && kind == "box") return run_script<BoxPlayer>(words[3], words[4]);
  if (verb == "play" && count == 5 && kind == "board") return run_script<BoardPlayer>(words[3], words[4]);
  if (verb == "step" && count == 6 && kind == "box") return run_stepped<BoxPlayer>(words[3], words[4], words[5]);
  if (verb == "step" && count == 6 && kind == "board") return run_stepped<BoardPlayer>(words[3], words[4], words[5]);
  std::fputs("driver crowd MILLISECONDS | meet TIMES | write FILE THREADS | play KIND FILE SCRIPT | step KIND FILE SCRIPT STATES\n", stderr);
  return 2;
}
