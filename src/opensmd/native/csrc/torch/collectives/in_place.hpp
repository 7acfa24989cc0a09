// Inputs inside the outputs' memory. Results arrive while inputs are still being read, so such inputs need a copy,
// except in NCCL's form, where a rank's own part already lies in its place.
#pragma once

#include <vector>

#include "torch/tensors.hpp"

namespace opensmd {

inline void set_apart(Flat& input, const Flat& output, const void* wanted_at) {
  if (input.overlaps(output) && input.data() != wanted_at) input.copy();
}

inline void set_apart(Flat& input, const std::vector<Flat>& outputs, int own) {
  for (size_t i = 0; i < outputs.size(); ++i) {
    set_apart(input, outputs[i], i == static_cast<size_t>(own) ? outputs[i].data() : nullptr);
  }
}

inline void set_apart(std::vector<Flat>& inputs, const Flat& output, int own) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    set_apart(inputs[i], output, i == static_cast<size_t>(own) ? output.data() : nullptr);
  }
}

}  // namespace opensmd
