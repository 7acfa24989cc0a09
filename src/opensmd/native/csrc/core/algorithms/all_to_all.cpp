#include "core/algorithms/all_to_all.hpp"

#include <algorithm>
#include <numeric>

#include "core/protocol/exchange.hpp"

namespace opensmd {

namespace {

// The members' counts are in the arena, by parity of the sequence number like the entry lines.
class ByTable : public Traffic {
 public:
  ByTable(const Context& context, uint64_t sequence) : context_(context), parity_(sequence & 1) {}
  size_t bytes(int source, int destination) const override { return row(source).given[destination]; }
  size_t largest(int source) const override {
    return *std::max_element(row(source).given, row(source).given + context_.size);
  }
  bool shared() const override { return false; }
  int lanes(int size) const override { return size - 1; }

  void write(const AllToAllOptions& options) {
    const size_t element = size_of(options.dtype);
    for (int i = 0; i < context_.size; ++i) {
      row(context_.rank).given[i] = options.in_counts[i] * element;
      row(context_.rank).expected[i] = options.out_counts[i] * element;
    }
  }
  Sizes& row(int member) const { return context_.arena.member(member).sizes[parity_]; }

 private:
  const Context& context_;
  uint64_t parity_;
};

class AllToAll : public CopyingExchange {
 public:
  AllToAll(Context& context, Round& round, const ByTable& table, const AllToAllOptions& options)
      : CopyingExchange(context, round, table, options.ins, options.outs), table_(table), element_(size_of(options.dtype)) {}

 protected:
  // Every member checks every pair, so that all raise.
  void check_agreement() override {
    for (int source = 0; source < context_.size; ++source) {
      for (int destination = 0; destination < context_.size; ++destination) {
        const uint64_t given = table_.row(source).given[destination];
        const uint64_t expected = table_.row(destination).expected[source];
        if (given == expected) continue;
        round_.fail(ErrorKind::Mismatch, context_.name(source) + " sends " + std::to_string(given / element_) +
                                             " elements to " + context_.name(destination) + ", which expects " +
                                             std::to_string(expected / element_) +
                                             "; input and output splits of each pair must agree");
      }
    }
  }

 private:
  const ByTable& table_;
  size_t element_;
};

}  // namespace

void all_to_all(Context& context, const AllToAllOptions& options, const Call& call) {
  Signature signature;
  signature.operation = Operation::AllToAll;
  signature.dtype = options.dtype;
  signature.count = std::accumulate(options.in_counts, options.in_counts + context.size, size_t{0});
  Round round(context, signature, call);
  ByTable table(context, round.sequence());
  table.write(options);
  AllToAll(context, round, table, options).run();
}

}  // namespace opensmd
