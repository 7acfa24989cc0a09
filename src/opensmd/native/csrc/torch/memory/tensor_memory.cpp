#include "torch/memory/tensor_memory.hpp"

#include <c10/core/CPUAllocator.h>
#include <pthread.h>

#include <mutex>

namespace opensmd {
namespace {

constexpr size_t kLarge = size_t{1} << 20;

// Tensors may outlive everything else: neither is ever destroyed.
c10::Allocator* small_tensors = nullptr;

void free_tensor(void* data) {
  if (data == nullptr) return;
  if (tensor_blocks().give_back(data)) {
    c10::profiledCPUMemoryReporter().Delete(data);
  } else {
    small_tensors->raw_deallocate(data);
  }
}

class TensorMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* block = bytes < kLarge ? nullptr : tensor_blocks().take(bytes);
    if (block == nullptr) return small_tensors->allocate(bytes);  // throws torch's own error if there is no memory
    c10::profiledCPUMemoryReporter().New(block, bytes);
    return {block, block, &free_tensor, at::Device(at::kCPU)};
  }

  // For small tensors, too, because torch asks for one function that frees them all.
  c10::DeleterFnPtr raw_deleter() const override { return &free_tensor; }

  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

void lock() { tensor_blocks().mutex().lock(); }
void unlock() { tensor_blocks().mutex().unlock(); }

}  // namespace

KeptBlocks& tensor_blocks() {
  static auto* blocks = new KeptBlocks;
  return *blocks;
}

void keep_tensor_memory() {
  static std::once_flag once;
  std::call_once(once, [] {
    small_tensors = c10::GetCPUAllocator();
    pthread_atfork(&lock, &unlock, &unlock);  // a forking thread may coincide with one that allocates
    c10::SetCPUAllocator(new TensorMemory);
  });
}

}  // namespace opensmd
