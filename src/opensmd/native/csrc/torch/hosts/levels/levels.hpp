// Collectives of a group that spans hosts, in two levels: shared memory on each host, messages between hosts, so that
// as few bytes as possible travel between hosts. A few bytes go with the comparison of calls (agreement.hpp), in one
// step; more follow it in parts, so that some travel while others are added up or copied in shared memory.
//
// One file per collective, with both paths. Each compares the calls first. Options are those of core/group.hpp.
#pragma once

#include "core/kernels/compression.hpp"
#include "core/protocol/record.hpp"
#include "torch/hosts/agreement.hpp"
#include "torch/hosts/layout.hpp"
#include "torch/hosts/local.hpp"
#include "torch/hosts/wire.hpp"

namespace opensmd::levels {

struct Levels {
  const Layout& layout;
  Local& local;
  Wire& wire;
  Agreement& agreement;
  // Whether the agreement's frames go between this layout's hosts, and so may carry data.
  bool framed;
  // From this many bytes on, each host sends to one other at a time in a sum that allows it (all_reduce.cpp): one that
  // may go along a ring, and any other.
  size_t ring_from, turns_from;
  // The least bytes in a part of a sum that hosts send straight to each other: a part costs two rounds in shared
  // memory, and a message to and from each other host, twice.
  size_t least_part;
  // The bytes that members send each other at a time in an all_to_all.
  size_t piece;

  bool carries(size_t bytes) const { return framed && agreement.carries(bytes); }
  bool carries_one_way(size_t bytes) const { return framed && agreement.carries_one_way(bytes); }
  bool carries_pieces(size_t bytes) const { return framed && agreement.carries_pieces(bytes); }
  // The route of frames where every host needs data from all others.
  Route round() const { return framed ? Route::round(layout.hosts()) : Route(); }
};

// One call: what members compare, and its text and timeout.
struct Calling {
  const Signature& signature;
  const Call& call;
};

void all_reduce(Levels& on, const Calling& calling, void* data, double factor);
void two_hosts_all_reduce(Levels& on, const Calling& calling, void* data, double factor);
void turns_all_reduce(Levels& on, const Calling& calling, void* data, double factor);
void ring_all_reduce(Levels& on, const Calling& calling, void* data, double factor);
// A sum or average of float32 numbers, sent between hosts in fewer bytes. `residual`: see coding.hpp.
void all_reduce_compressed(Levels& on, const Calling& calling, float* data, Compression compression, float* residual);
void reduce(Levels& on, const Calling& calling, const void* in, void* out, double factor);
void broadcast(Levels& on, const Calling& calling, void* data);
void all_gather(Levels& on, const Calling& calling, const void* in, void* const* outs, const size_t* counts);
void gather(Levels& on, const Calling& calling, const void* in, void* const* outs);
void scatter(Levels& on, const Calling& calling, const void* const* ins, void* out);
void reduce_scatter(Levels& on, const Calling& calling, const void* const* ins, const size_t* counts, void* out,
                    double factor);
void ring_reduce_scatter(Levels& on, const Calling& calling, const void* const* ins, const size_t* counts, void* out,
                         double factor);
void all_to_all(Levels& on, const Calling& calling, const void* const* ins, const size_t* in_counts,
                void* const* outs, const size_t* out_counts);

}  // namespace opensmd::levels
