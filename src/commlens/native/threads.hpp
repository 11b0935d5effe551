// The native id of the calling thread, cached.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace commlens {

inline uint32_t& cached_thread_id() {
  thread_local uint32_t id = 0;
  return id;
}

inline uint32_t this_thread() {
  uint32_t& id = cached_thread_id();
  if (!id) id = static_cast<uint32_t>(syscall(SYS_gettid));
  return id;
}

}  // namespace commlens
