// The loops that exist once for each instruction set, as tables of function pointers indexed by dtype. No torch headers.
#pragma once

#include <cstdint>

#include "../common/activation.h"
#include "../common/numeric.h"

namespace whale::cpu {

// A strided tensor in logical order: `dims` sizes and strides, outer to inner.
struct Strided {
  const int64_t* sizes;
  const int64_t* strides;
  int dims;
};

struct BucketLoops {
  // [from][to], dense on both sides. `checked` tells whether a value read was not finite.
  void (*cast[kNumDtypes][kNumDtypes])(const void* from, void* to, int64_t count, double scale);
  bool (*cast_checked[kNumDtypes][kNumDtypes])(const void* from, void* to, int64_t count, double scale);
  // Elements begin .. begin + count of a strided tensor, to or from dense memory.
  void (*gather[kNumDtypes][kNumDtypes])(const void* from, Strided layout, int64_t begin, void* to, int64_t count, double scale);
  bool (*scatter[kNumDtypes][kNumDtypes])(const void* from, void* to, Strided layout, int64_t begin, int64_t count,
                                    double scale);
  // The largest magnitude, as the bits of a float.
  uint32_t (*largest[kNumDtypes])(const void* from, int64_t count);
};

struct StatsRows {
  const void* logits;
  int64_t row_stride, num_rows, num_classes, first_class;
  const int64_t* target;
  const void* class_weight;  // null is ones
  bool smoothing;
  void* stats;  // [4, num_rows]
};

struct GradRows {
  const void* logits;
  int64_t row_stride, num_classes, first_class;
  const int64_t* target;
  const void *lse, *softmax_coef, *target_coef;
  const void* smooth_coef;   // null is zeros
  const void* class_weight;  // null is ones
  void* grad;                // may be logits
  int64_t grad_row_stride;
};

struct SoftmaxLoops {
  void (*stats[kNumDtypes])(const StatsRows& rows, int64_t begin, int64_t end);
  void (*grad[kNumDtypes])(const GradRows& rows, int64_t begin, int64_t end);
};

constexpr int kRouteLanes = 16;

struct RouteRows {
  const void* logits;
  int64_t row_stride, num_experts, k, groups;
  bool sigmoid;
  const void* bias;  // null is none
  void* scores;      // [tokens, k]
  int32_t* experts;  // [tokens, k]
  void* probs;       // [tokens, num_experts]
};

struct RouteGradRows {
  const void* probs;
  const int32_t* experts;
  const void *dscores, *dprobs;  // null is zeros
  int64_t num_experts, k, groups;
  bool sigmoid;
  void* dlogits;
};

struct RoutingLoops {
  // scratch: a number and a key, 8 bytes each at most, for each expert and lane.
  void (*route[kNumDtypes])(const RouteRows& rows, void* scratch, int64_t begin, int64_t end);
  // scratch: a number for each expert. Returns false if an expert does not exist.
  bool (*route_backward[kNumDtypes])(const RouteGradRows& rows, void* scratch, int64_t begin, int64_t end);
};

struct PermutationLoops {
  // [rows][to]: to = cast(the weighted sum of rows, in order), with weights and scratch [count] of the wider type.
  void (*combine[kNumDtypes][kNumDtypes])(const void* const* rows, const void* weights, int64_t num_rows, void* to,
                                          void* scratch, int64_t count);
  // [dy][y]: drow = cast(weight * dy), of y's type; returns the dot product of dy and y.
  double (*combine_backward[kNumDtypes][kNumDtypes])(const void* dy, const void* y, double weight, void* drow,
                                                     int64_t count);
};

struct ActivationRows {
  const void *h, *u;  // u null is no gate
  void* out;
  int64_t num_rows, num_columns;
};

struct ActivationGradRows {
  void* grad;
  const void *h, *u;  // u null is no gate
  void *du, *dbias, *du_bias;  // sums are added to; null is not wanted
  void* scratch;               // [2, num_columns] of the wider type
  int64_t num_rows, num_columns;
};

struct ActivationLoops {
  // [function][dtype], on columns begin to end.
  void (*forward[kNumActivations][kNumDtypes])(const ActivationRows& rows, int64_t begin, int64_t end);
  void (*backward[kNumActivations][kNumDtypes])(const ActivationGradRows& rows, int64_t begin, int64_t end);
};

// The checksum, not inverted, of what it stood for and these bytes.
using Crc32c = uint32_t (*)(uint32_t crc, const uint8_t* data, int64_t bytes);

struct Crc32cLoops {
  Crc32c by_tables;
  Crc32c by_chains;   // needs PCLMULQDQ; null where the instruction set has no crc32
  Crc32c by_folding;  // needs VPCLMULQDQ; null below AVX-512
};

namespace baseline {
extern const BucketLoops bucket_loops;
extern const SoftmaxLoops softmax_loops;
extern const RoutingLoops routing_loops;
extern const PermutationLoops permutation_loops;
extern const ActivationLoops activation_loops;
extern const Crc32cLoops crc32c_loops;
}  // namespace baseline

#ifdef WHALE_X86_64
namespace v3 {
extern const BucketLoops bucket_loops;
extern const SoftmaxLoops softmax_loops;
extern const RoutingLoops routing_loops;
extern const PermutationLoops permutation_loops;
extern const ActivationLoops activation_loops;
extern const Crc32cLoops crc32c_loops;
}  // namespace v3
namespace v4 {
extern const BucketLoops bucket_loops;
extern const SoftmaxLoops softmax_loops;
extern const RoutingLoops routing_loops;
extern const PermutationLoops permutation_loops;
extern const ActivationLoops activation_loops;
extern const Crc32cLoops crc32c_loops;
}  // namespace v4
#endif

}  // namespace whale::cpu
