// The reduction kernels alone: narrow float conversions, NaN, overflow, and the same bits on every instruction set.
#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "core/kernels/compression.hpp"
#include "core/kernels/kernels.hpp"
#include "core/kernels/narrow_floats.hpp"
#include "harness.hpp"
#include "reference.hpp"

using namespace opensmd;
using reference::all_dtypes;
using reference::all_reductions;

namespace {

std::vector<SimdLevel> levels() {
  std::vector<SimdLevel> all = {SimdLevel::Generic};
  if (best_simd_level() >= SimdLevel::Avx2) all.push_back(SimdLevel::Avx2);
  if (best_simd_level() >= SimdLevel::Avx512) all.push_back(SimdLevel::Avx512);
  return all;
}

const std::vector<DType> kNarrow = {DType::F16,    DType::BF16,       DType::F8E4M3FN,
                                    DType::F8E5M2, DType::F8E4M3FNUZ, DType::F8E5M2FNUZ};

// Bytes that begin a cache line.
class Lines {
 public:
  explicit Lines(size_t bytes) : all_(bytes + 64), first_((64 - reinterpret_cast<uintptr_t>(all_.data()) % 64) % 64) {}
  unsigned char* data() { return all_.data() + first_; }

 private:
  std::vector<unsigned char> all_;
  size_t first_;
};

uint32_t code_at(DType dtype, const void* data, size_t i) {
  return size_of(dtype) == 1 ? static_cast<const uint8_t*>(data)[i] : static_cast<const uint16_t*>(data)[i];
}

TEST(widen, "every code of every narrow float widens to its value and narrows back to itself") {
  for (const SimdLevel level : levels()) {
    for (const DType dtype : kNarrow) {
      const NarrowFormat* format = narrow_format(dtype, level);
      const size_t codes = size_t{1} << (8 * size_of(dtype));
      std::vector<uint16_t> all(codes);
      for (size_t i = 0; i < codes; ++i) {
        if (size_of(dtype) == 1) {
          reinterpret_cast<uint8_t*>(all.data())[i] = static_cast<uint8_t>(i);
        } else {
          all[i] = static_cast<uint16_t>(i);
        }
      }
      std::vector<float> wide(codes);
      std::vector<uint16_t> back(codes);
      format->widen(wide.data(), all.data(), codes);
      format->narrow(back.data(), wide.data(), codes);
      for (size_t i = 0; i < codes; ++i) {
        const double value = reference::decode(*reference::format_of(dtype), static_cast<uint32_t>(i));
        if (std::isnan(value)) {
          const double again = reference::decode(*reference::format_of(dtype), code_at(dtype, back.data(), i));
          CHECK(std::isnan(wide[i]) && std::isnan(again), name_of(dtype) << " code " << i);
        } else {
          CHECK(static_cast<double>(wide[i]) == value, name_of(dtype) << " code " << i << ": " << wide[i]);
          CHECK(code_at(dtype, back.data(), i) == i, name_of(dtype) << " code " << i);
        }
      }
    }
  }
}

TEST(narrow, "floats narrow to the nearest code, the even one in the middle") {
  for (const DType dtype : kNarrow) {
    const reference::FloatFormat& format = *reference::format_of(dtype);
    std::vector<float> values;
    uint32_t positive = 1u << (8 * size_of(dtype) - 1);
    for (uint32_t code = 0; code + 1 < positive; ++code) {
      const double low = reference::decode(format, code);
      const double high = reference::decode(format, code + 1);
      if (!std::isfinite(low) || !std::isfinite(high)) continue;
      const float middle = static_cast<float>((low + high) / 2);
      for (const float value : {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, 1e30f)}) {
        values.push_back(value);
        values.push_back(-value);
      }
    }
    std::vector<uint32_t> wanted;
    for (const float value : values) wanted.push_back(reference::encode(format, static_cast<double>(value)));
    std::vector<uint16_t> codes(values.size());
    for (const SimdLevel level : levels()) {
      narrow_format(dtype, level)->narrow(codes.data(), values.data(), values.size());
      for (size_t i = 0; i < values.size(); ++i) {
        CHECK(code_at(dtype, codes.data(), i) == wanted[i],
              name_of(dtype) << " of " << values[i] << ": " << code_at(dtype, codes.data(), i) << " not " << wanted[i]);
      }
    }
  }
}

TEST(overflow, "what is too large becomes infinity where the format has one, else NaN") {
  const float huge[4] = {1e30f, -1e30f, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()};
  for (const SimdLevel level : levels()) {
    for (const DType dtype : kNarrow) {
      if (dtype == DType::BF16) continue;
      uint16_t codes[4];
      float back[4];
      narrow_format(dtype, level)->narrow(codes, huge, 4);
      narrow_format(dtype, level)->widen(back, codes, 4);
      const bool infinite = reference::format_of(dtype)->infinite;
      for (int i = 0; i < 3; ++i) CHECK(infinite ? std::isinf(back[i]) : std::isnan(back[i]), name_of(dtype) << back[i]);
      CHECK(!infinite || (back[0] > 0 && back[1] < 0), name_of(dtype));
      CHECK(std::isnan(back[3]), name_of(dtype));
    }
  }
}

TEST(nan, "min and max keep a NaN of any input") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const SimdLevel level : levels()) {
    for (const Reduction reduction : {Reduction::Min, Reduction::Max}) {
      for (size_t place = 0; place < 3; ++place) {
        std::vector<std::vector<float>> arrays(3, std::vector<float>(67, 1.0f));
        arrays[place][40] = nan;
        const void* inputs[3] = {arrays[0].data(), arrays[1].data(), arrays[2].data()};
        std::vector<float> out(67);
        void* outputs[1] = {out.data()};
        Reducer(DType::F32, reduction, 3, level)(outputs, 1, inputs, 3, 67 * 4);
        for (size_t i = 0; i < 67; ++i) CHECK(std::isnan(out[i]) == (i == 40), "place " << place << " element " << i);
      }
    }
  }
}

TEST(integers, "sums of integers wrap around, averages do not overflow and truncate toward zero") {
  const int8_t a[3] = {127, -128, -3};
  const int8_t b[3] = {127, -128, -4};
  const void* inputs[2] = {a, b};
  int8_t out[3];
  void* outputs[1] = {out};
  for (const SimdLevel level : levels()) {
    Reducer(DType::I8, Reduction::Sum, 2, level)(outputs, 1, inputs, 2, 3);
    CHECK(out[0] == -2 && out[1] == 0 && out[2] == -7, int(out[0]) << " " << int(out[1]));
    Reducer(DType::I8, Reduction::Average, 2, level)(outputs, 1, inputs, 2, 3);
    CHECK(out[0] == 127 && out[1] == -128 && out[2] == -3, int(out[2]));
    Reducer(DType::I8, Reduction::Max, 2, level)(outputs, 1, inputs, 2, 3);
    CHECK(out[2] == -3, int(out[2]));
  }
}

TEST(same_bits, "every instruction set gives the same bits, at any alignment and in place") {
  std::mt19937 random(5);
  for (const DType dtype : all_dtypes()) {
    for (const Reduction reduction : all_reductions()) {
      if (!reducible(dtype, reduction)) continue;
      for (const int ranks : {1, 2, 3, 4, 5, 8, 9}) {
        const size_t element = size_of(dtype);
        const size_t count = 1 + random() % 3000;
        const size_t shift = random() % 9 * element;
        std::vector<std::vector<unsigned char>> arrays;
        for (int r = 0; r < ranks; ++r) {
          arrays.emplace_back(count * element + shift);
          // Any values, but floats stay finite so that NaN payloads do not matter.
          reference::fill(dtype, arrays.back().data() + shift, count, r, random());
        }
        std::vector<double> factors;
        for (int r = 0; r < ranks; ++r) factors.push_back(reference::factor_of(r) / 3);
        std::vector<std::vector<unsigned char>> results;
        for (const SimdLevel level : levels()) {
          std::vector<std::vector<unsigned char>> copies = arrays;
          std::vector<const void*> inputs;
          std::vector<void*> outputs;
          for (auto& copy : copies) inputs.push_back(copy.data() + shift);
          for (auto& copy : copies) outputs.push_back(copy.data() + shift);
          Reducer(dtype, reduction, ranks, level)(outputs.data(), ranks, inputs.data(), ranks, count * element,
                                                  factors.data());
          for (const auto& copy : copies) {
            CHECK(std::equal(copy.begin() + static_cast<long>(shift), copy.end(),
                             copies[0].begin() + static_cast<long>(shift)),
                  "outputs differ");
          }
          results.push_back(copies[0]);
        }
        for (const auto& result : results) {
          CHECK(result == results[0], name_of(dtype) << " " << name_of(reduction) << " of " << ranks);
        }
      }
    }
  }
}

TEST(backwards, "walking backwards through memory gives the same bits, in place of all inputs") {
  for (const DType dtype : all_dtypes()) {
    for (const Reduction reduction : {Reduction::Sum, Reduction::Average, Reduction::Max}) {
      if (!reducible(dtype, reduction)) continue;
      const size_t element = size_of(dtype);
      for (const int ranks : {2, 3, 4, 5, 8}) {
        for (const size_t bytes : {size_t{0}, size_t{48}, size_t{64 * 11}, size_t{10 * 1024 + 48}}) {
          std::vector<std::vector<unsigned char>> given(static_cast<size_t>(ranks));
          for (int r = 0; r < ranks; ++r) {
            given[static_cast<size_t>(r)].resize(bytes);
            reference::fill(dtype, given[static_cast<size_t>(r)].data(), bytes / element, r, 5);
          }
          for (const SimdLevel level : levels()) {
            const Reducer reducer(dtype, reduction, ranks, level);
            const auto reduced = [&](Walk walk) {
              auto arrays = given;
              std::vector<void*> all;
              for (auto& each : arrays) all.push_back(each.data());
              reducer(all.data(), ranks, all.data(), ranks, bytes, nullptr, walk);
              return arrays;
            };
            CHECK(reduced(Walk::Forwards) == reduced(Walk::Backwards),
                  name_of(dtype) << " " << name_of(reduction) << " of " << ranks << " times " << bytes << " bytes");
          }
        }
      }
    }
  }
}

TEST(past_cache, "reducing past the caches gives the same bits, wherever inputs and output begin") {
  constexpr size_t kLong = 100 * 1024 + 48;
  for (const DType dtype : all_dtypes()) {
    const size_t element = size_of(dtype);
    Lines first(kLong), b(kLong);
    reference::fill(dtype, first.data(), kLong / element, 0, 1);
    reference::fill(dtype, b.data(), kLong / element, 1, 2);
    for (const Reduction reduction : {Reduction::Sum, Reduction::Average, Reduction::Max}) {
      if (!reducible(dtype, reduction)) continue;
      for (const size_t bytes : {size_t{48}, kLong}) {
        for (const size_t shift : {size_t{0}, size_t{64}, size_t{128} - element}) {
          Lines a(bytes + shift), cached(bytes + shift), past(bytes + shift);
          std::memcpy(a.data() + shift, first.data(), bytes);
          const void* inputs[2] = {a.data() + shift, b.data()};
          for (const SimdLevel level : levels()) {
            const Reducer reducer(dtype, reduction, 2, level);
            void* outputs[1] = {cached.data() + shift};
            reducer(outputs, 1, inputs, 2, bytes);
            outputs[0] = past.data() + shift;
            reducer(outputs, 1, inputs, 2, bytes, nullptr, Walk::PastCache);
            CHECK(std::memcmp(cached.data() + shift, past.data() + shift, bytes) == 0,
                  name_of(dtype) << " " << name_of(reduction) << " of " << bytes << " bytes at " << shift);
          }
        }
      }
    }
  }
}

}  // namespace

TEST(compressed, "numbers come back as near as a code allows, with the same bits on every instruction set") {
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  for (const size_t count : {size_t{0}, size_t{1}, size_t{255}, size_t{256}, size_t{1000}}) {
    std::vector<float> in(count);
    for (size_t i = 0; i < count; ++i) in[i] = normal(random) * (i < 256 ? 1e-3f : 1e3f);
    for (const Compression kind : {Compression::Bf16, Compression::Fp16, Compression::Int8}) {
      std::vector<char> first;
      for (const SimdLevel level : levels()) {
        const Compressor compressor(kind, level);
        std::vector<char> code(compressor.bytes(count));
        std::vector<float> out(count);
        compressor.compress(code.data(), in.data(), count);
        compressor.expand(out.data(), code.data(), count);
        if (level == SimdLevel::Generic) first = code;
        CHECK(code == first, name_of(kind) << " of " << count);
        for (size_t i = 0; i < count; ++i) {
          float largest = 0;  // of the block
          for (size_t j = i / 256 * 256; j < std::min(count, i / 256 * 256 + 256); ++j) {
            largest = std::max(largest, std::abs(in[j]));
          }
          const float allowed = kind == Compression::Int8   ? largest / 253
                                : kind == Compression::Fp16 ? std::max(std::abs(in[i]) * 0x1p-11f, 0x1p-25f)
                                                            : std::abs(in[i]) * 0x1p-8f;
          CHECK(std::abs(out[i] - in[i]) <= allowed, name_of(kind) << ": " << in[i] << " became " << out[i]);
          CHECK(kind != Compression::Int8 || std::abs(in[i]) < largest || std::abs(out[i] - in[i]) <= largest * 1e-6f,
                "the largest " << in[i] << " became " << out[i]);
        }
      }
    }
  }
}

TEST(compressed_sizes, "int8 takes a byte a number and four for each block of them, the others two a number") {
  CHECK(Compressor(Compression::Int8).bytes(0) == 0 && Compressor(Compression::Int8).bytes(1) == 5, "");
  CHECK(Compressor(Compression::Int8).bytes(256) == 260 && Compressor(Compression::Int8).bytes(257) == 265, "");
  CHECK(Compressor(Compression::Bf16).bytes(7) == 14 && Compressor(Compression::Fp16).bytes(7) == 14, "");
}

TEST(compressed_extremes, "in int8 a number that is not finite makes its block NaN, and tiny ones become zero") {
  constexpr float kInfinite = std::numeric_limits<float>::infinity();
  for (const SimdLevel level : levels()) {
    const Compressor compressor(Compression::Int8, level);
    for (const float wrong : {kInfinite, -kInfinite, std::numeric_limits<float>::quiet_NaN()}) {
      std::vector<float> in(600, 1.0f), out(600);
      in[300] = wrong;
      std::vector<char> code(compressor.bytes(in.size()));
      compressor.compress(code.data(), in.data(), in.size());
      compressor.expand(out.data(), code.data(), in.size());
      for (size_t i = 0; i < in.size(); ++i) CHECK(std::isnan(out[i]) == (i / 256 == 1), i << ": " << out[i]);
    }
    for (const float largest : {0.0f, 1e-44f, 1e-38f, 1e-31f, 1e-29f, 3e38f}) {
      const std::vector<float> in{largest, -largest, largest / 3};
      std::vector<float> out(3);
      std::vector<char> code(compressor.bytes(3));
      compressor.compress(code.data(), in.data(), 3);
      compressor.expand(out.data(), code.data(), 3);
      for (size_t i = 0; i < 3; ++i) {
        CHECK(std::abs(out[i] - in[i]) <= std::max(largest / 200, 1e-30f), in[i] << " became " << out[i]);
      }
    }
  }
}

int main(int argc, char** argv) { return harness::run_all(argc, argv); }
