// Tells a forked child, which inherits the mapping but is no member, from the process that made the group.
#pragma once

#include <sys/mman.h>

#include <new>

#include "core/memory/arena.hpp"

namespace opensmd {

// The kernel wipes the page in a child: a check costs one load, where getpid would cost a system call.
class ForkGuard {
 public:
  ForkGuard() {
    void* page = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) throw std::bad_alloc();
    owner_ = static_cast<volatile uint32_t*>(page);
    madvise(page, kPage, MADV_WIPEONFORK);
    *owner_ = 1;
  }
  ~ForkGuard() { munmap(const_cast<uint32_t*>(owner_), kPage); }
  ForkGuard(const ForkGuard&) = delete;
  ForkGuard& operator=(const ForkGuard&) = delete;

  bool in_child() const { return *owner_ == 0; }
  void check() const {
    if (in_child()) {
      throw CollectiveError(
          "this group belongs to the parent process: a forked child cannot use it. Start workers with the 'spawn' "
          "method, or make the group after the fork");
    }
  }

 private:
  volatile uint32_t* owner_;
};

}  // namespace opensmd
