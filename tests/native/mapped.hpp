// A box in a file or in anonymous memory, and how to read it while others write: docs/protocol.md, "Reading it", in C++.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "../../src/commlens/native/box.hpp"

namespace check {

using namespace commlens;

[[noreturn]] inline void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
[[noreturn]] inline void fail(const char* format, ...) {
  va_list values;
  va_start(values, format);
  std::vfprintf(stderr, format, values);
  va_end(values);
  std::fputc('\n', stderr);
  std::_Exit(1);
}

inline char* map_shared(uint64_t size, int descriptor = -1) {
  void* map = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | (descriptor < 0 ? MAP_ANONYMOUS : 0), descriptor, 0);
  if (map == MAP_FAILED) fail("%llu bytes cannot be mapped", static_cast<unsigned long long>(size));
  return static_cast<char*>(map);
}

struct MappedFile {
  char* map;
  uint64_t size;

  explicit MappedFile(const char* path) {
    const int descriptor = open(path, O_RDWR);
    struct stat found;
    if (descriptor < 0 || fstat(descriptor, &found)) fail("%s cannot be opened", path);
    size = static_cast<uint64_t>(found.st_size);
    map = map_shared(size, descriptor);
    close(descriptor);
  }
};

// Where the parts of a box are: the fields of its header that a writer needs.
struct Geometry {
  uint64_t capacity, side_at, side_size, epoch;

  static Geometry of(char* map) {
    uint32_t capacity;
    std::memcpy(&capacity, map + 20, 4);
    return {capacity, *word_at(map, 24), *word_at(map, 32), *word_at(map, 88)};
  }
};

inline unsigned long long wide(uint64_t value) { return value; }  // for printf

}  // namespace check
