// The floor's collectives as contestants in the ranks of the other benchmarks: in a loop, or called from Python.
#include <Python.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <memory>

#include "floor.hpp"

namespace {

void* map(const char* path, int64_t bytes) {
  const int file = open(path, O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, bytes) != 0) return nullptr;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  return memory == MAP_FAILED ? nullptr : memory;
}

// A letter is one of mpi_loop.c's, or 'z': the zero-copy all-reduce, `out` being rank 0's tensor, `in` rank 1's.
void call(floor_::Rank& rank, char letter, float* in, float* out, int64_t count) {
  switch (letter) {
    case 'r': return rank.all_reduce(out, count);
    case 'z': return rank.zero_copy(out, in - out, count);
    case 'b': return rank.broadcast(out, count);
    case 'g': return rank.all_gather(in, out, count);
    case 's': return rank.reduce_scatter(in, out, count);
    case 'a': return rank.all_to_all(in, out, count);
    case 'p': return rank.send_and_back(out, count);
    default: return rank.flags();
  }
}

struct Bound {
  Bound(floor_::Rank& rank, char letter, float* in, float* out, int64_t count, PyObject* owner)
      : rank(rank), letter(letter), in(in), out(out), count(count), owner(owner) { Py_INCREF(owner); }
  ~Bound() { Py_DECREF(owner); }
  floor_::Rank& rank;
  const char letter;
  float *const in, *const out;
  const int64_t count;
  PyObject* const owner;
};

Bound* bound(PyObject* capsule) { return static_cast<Bound*>(PyCapsule_GetPointer(capsule, nullptr)); }

PyObject* call_bound(PyObject* capsule, PyObject*) {
  const Bound& it = *bound(capsule);
  call(it.rank, it.letter, it.in, it.out, it.count);
  Py_RETURN_NONE;
}

PyMethodDef call_method = {"call", call_bound, METH_NOARGS, nullptr};

}  // namespace

extern "C" {

// `path` is a file in shared memory that all ranks open; the first to come makes it large enough.
void* floor_join(const char* path, int rank, int size) {
  void* memory = map(path, sizeof(floor_::Arena));
  return memory == nullptr ? nullptr : new floor_::Rank(static_cast<floor_::Arena*>(memory), rank, size);
}

void floor_loop(void* rank, char letter, float* in, float* out, int64_t count, int64_t* stamps, int calls) {
  stamps[0] = floor_::now();
  for (int i = 1; i <= calls; i++) {
    call(*static_cast<floor_::Rank*>(rank), letter, in, out, count);
    stamps[i] = floor_::now();
  }
}

// Nanoseconds of additions that do not wait for one another: twice as long while somebody else uses half of the core.
int64_t floor_additions() {
  const int64_t start = floor_::now();
  uint64_t a = 0, b = 0, c = 0, d = 0;
  for (int i = 0; i < 25000; i++) {
    a++, b++, c++, d++;
    asm volatile("" : "+r"(a), "+r"(b), "+r"(c), "+r"(d));
  }
  return floor_::now() - start;
}

// A Python function without arguments that makes one call; it holds the GIL meanwhile. `owner` is that of the memory.
PyObject* floor_bind(void* rank, char letter, float* in, float* out, int64_t count, PyObject* owner) {
  auto owned = std::make_unique<Bound>(*static_cast<floor_::Rank*>(rank), letter, in, out, count, owner);
  PyObject* capsule = PyCapsule_New(owned.get(), nullptr, [](PyObject* self) { delete bound(self); });
  if (capsule == nullptr) return nullptr;
  owned.release();
  PyObject* function = PyCFunction_New(&call_method, capsule);
  Py_DECREF(capsule);
  return function;
}
}
