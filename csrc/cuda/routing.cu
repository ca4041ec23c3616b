// moe_route, moe_route_backward, moe_positions on CUDA: a warp for each token, then a warp for each piece of the routes.
// Nothing is counted by atomics whose order could show, so results are the same every time.
#include "../common/routing.h"

#include <algorithm>
#include <tuple>

#include "launch.h"

namespace whale::cuda {
namespace {

constexpr int kMaxWarps = 4;
constexpr unsigned kAll = 0xffffffffu;
constexpr int64_t kSharedBytes = 48 * 1024;  // of a block, without asking for more

template <class T>
__device__ __forceinline__ T warp_sum(T value) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(kAll, value, distance);
  return value;
}

template <class T>
__device__ __forceinline__ T warp_max(T value) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    const T other = __shfl_xor_sync(kAll, value, distance);
    value = other > value ? other : value;
  }
  return value;
}

template <class S, class A>
struct RouteArguments {
  const S* logits;
  int64_t row_stride, num_tokens;
  int num_experts, k, groups;
  bool sigmoid;
  const A* bias;  // null is none
  A* scores;
  int32_t* experts;
  A* probs;
};

// Probabilities of the experts first .. last by the lanes of a warp; lane l writes and reads every 32nd from first + l on.
template <class S, class A>
__device__ __forceinline__ void write_probs(const S* logits, A* probs, int first, int last, bool is_sigmoid, int lane) {
  if (is_sigmoid) {
    for (int e = first + lane; e < last; e += kWarp) probs[e] = sigmoid(A(widen(logits[e])));
    return;
  }
  A largest = negative_infinity(A());
  for (int e = first + lane; e < last; e += kWarp) {
    const A value = widen(logits[e]);
    largest = value > largest ? value : largest;
  }
  const A shift = finite_shift(warp_max(largest));
  A sum = 0;
  for (int e = first + lane; e < last; e += kWarp) {
    const A value = exponential_to_88(A(widen(logits[e])) - shift);
    probs[e] = value;
    sum += value;
  }
  const A factor = A(1) / warp_sum(sum);
  for (int e = first + lane; e < last; e += kWarp) probs[e] *= factor;
}

template <class S, class A>
__global__ void __launch_bounds__(kWarp* kMaxWarps) route_kernel(const RouteArguments<S, A> arguments) {
  using Key = typename KeyOf<A>::type;
  extern __shared__ int64_t shared[];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, num_experts = arguments.num_experts;
  Key* keys = reinterpret_cast<Key*>(shared) + warp * num_experts;
  const int64_t token = int64_t(blockIdx.x) * (blockDim.x / kWarp) + warp;
  if (token >= arguments.num_tokens) return;
  const S* logits = arguments.logits + token * arguments.row_stride;
  A* probs = arguments.probs + token * num_experts;
  const int in_group = num_experts / arguments.groups, of_group = arguments.k / arguments.groups;
  for (int group = 0; group < arguments.groups; ++group) {
    const int first = group * in_group, last = first + in_group;
    write_probs<S, A>(logits, probs, first, last, arguments.sigmoid, lane);
    for (int e = first + lane; e < last; e += kWarp) {
      keys[e] = KeyOf<A>::from(arguments.bias ? probs[e] + arguments.bias[e] : A(widen(logits[e])));
    }
    for (int slot = group * of_group; slot < (group + 1) * of_group; ++slot) {
      Key largest = KeyOf<A>::taken;
      int index = last;
      for (int e = first + lane; e < last; e += kWarp) {
        if (keys[e] > largest) {
          largest = keys[e];
          index = e;
        }
      }
      for (int distance = kWarp / 2; distance > 0; distance /= 2) {
        const Key other = __shfl_xor_sync(kAll, largest, distance);
        const int other_index = __shfl_xor_sync(kAll, index, distance);
        if (other > largest || (other == largest && other_index < index)) {
          largest = other;
          index = other_index;
        }
      }
      // Only the lane that made an expert's key and probability reads or changes them.
      if ((index - first) % kWarp == lane) {
        keys[index] = KeyOf<A>::taken;
        arguments.experts[token * arguments.k + slot] = index;
        arguments.scores[token * arguments.k + slot] = probs[index];
      }
    }
  }
}

template <class S, class A>
struct RouteGradArguments {
  const A* probs;
  const int32_t* experts;
  const A *dscores, *dprobs;  // null is zeros
  int64_t num_tokens;
  int num_experts, k, groups;
  bool sigmoid;
  S* dlogits;
};

template <class S, class A>
__device__ __forceinline__ A grad_of_prob(const RouteGradArguments<S, A>& arguments, int64_t token, int expert) {
  A grad = arguments.dprobs ? arguments.dprobs[token * arguments.num_experts + expert] : A(0);
  if (arguments.dscores == nullptr) return grad;
  for (int64_t route = token * arguments.k; route < (token + 1) * arguments.k; ++route) {
    if (arguments.experts[route] == expert) grad += arguments.dscores[route];
  }
  return grad;
}

template <class S, class A>
__global__ void __launch_bounds__(kWarp* kMaxWarps, kNoSpills) route_backward_kernel(const RouteGradArguments<S, A> arguments) {
  const int lane = threadIdx.x % kWarp, num_experts = arguments.num_experts, in_group = num_experts / arguments.groups;
  const int64_t token = int64_t(blockIdx.x) * (blockDim.x / kWarp) + threadIdx.x / kWarp;
  if (token >= arguments.num_tokens) return;
  for (int route = lane; route < arguments.k; route += kWarp) {
    if (arguments.experts[token * arguments.k + route] >= num_experts) __trap();
  }
  const A* p = arguments.probs + token * num_experts;
  S* out = arguments.dlogits + token * num_experts;
  for (int first = 0; first < num_experts; first += in_group) {
    const int last = first + in_group;
    if (arguments.sigmoid) {
      for (int e = first + lane; e < last; e += kWarp) {
        out[e] = Narrow<S>::from(sigmoid_gradient(p[e], grad_of_prob(arguments, token, e)));
      }
      continue;
    }
    A dot = 0;
    for (int e = first + lane; e < last; e += kWarp) dot += p[e] * grad_of_prob(arguments, token, e);
    dot = warp_sum(dot);
    for (int e = first + lane; e < last; e += kWarp) {
      out[e] = Narrow<S>::from(softmax_gradient(p[e], grad_of_prob(arguments, token, e), dot));
    }
  }
}

// Routes in the order in which they take their turns, in pieces of which a warp takes one.
struct Turns {
  const int32_t* experts;
  const int64_t* order;  // null is as they are
  int64_t num_tokens, k, piece;
  int num_experts, num_pieces;
  bool slot_major;

  __device__ __forceinline__ int64_t route_of(int64_t turn) const {
    const int64_t token = slot_major ? turn % num_tokens : turn / k, slot = slot_major ? turn / num_tokens : turn % k;
    return (order == nullptr ? token : order[token]) * k + slot;
  }
};

__global__ void __launch_bounds__(kWarp) count_kernel(const Turns turns, int32_t* counts) {
  extern __shared__ int32_t mine[];
  for (int e = threadIdx.x; e < turns.num_experts; e += kWarp) mine[e] = 0;
  __syncwarp();
  const int64_t begin = blockIdx.x * turns.piece, end = min(begin + turns.piece, turns.num_tokens * turns.k);
  for (int64_t turn = begin + threadIdx.x; turn < end; turn += kWarp) {
    const int64_t route = turns.route_of(turn);
    // An order that is no permutation, or an expert that does not exist.
    if (uint64_t(route) >= uint64_t(turns.num_tokens * turns.k) || turns.experts[route] >= turns.num_experts) __trap();
    if (turns.experts[route] >= 0) atomicAdd(&mine[turns.experts[route]], 1);
  }
  __syncwarp();
  for (int e = threadIdx.x; e < turns.num_experts; e += kWarp) {
    counts[int64_t(blockIdx.x) * turns.num_experts + e] = mine[e];
  }
}

struct Placed {
  const int64_t* capacity;  // null is none
  int64_t slots;            // -1 packs the rows
  int64_t *counts, *kept;
  int32_t* first;  // the row of each expert's first route
};

// What came before each piece within its expert, and where experts begin. One block.
__global__ void __launch_bounds__(1024) place_kernel(const Turns turns, int32_t* __restrict__ counts, const Placed placed) {
  for (int e = threadIdx.x; e < turns.num_experts; e += blockDim.x) {
    int64_t before = 0;
    for (int piece = 0; piece < turns.num_pieces; ++piece) {
      int32_t& count = counts[int64_t(piece) * turns.num_experts + e];
      const int32_t here = count;
      count = int32_t(before);
      before += here;
    }
    placed.counts[e] = before;
    int64_t kept = before;
    if (placed.capacity != nullptr) {
      if (placed.capacity[e] < 0) __trap();
      kept = min(kept, placed.capacity[e]);
    }
    placed.kept[e] = placed.slots >= 0 ? min(kept, placed.slots) : kept;
  }
  __syncthreads();
  if (threadIdx.x >= kWarp) return;
  int64_t row = 0;
  for (int begin = 0; begin < turns.num_experts; begin += kWarp) {
    const int e = begin + threadIdx.x;
    const int64_t kept = e < turns.num_experts ? placed.kept[e] : 0;
    int64_t up_to = kept;
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const int64_t lower = __shfl_up_sync(kAll, up_to, distance);
      if (int(threadIdx.x) >= distance) up_to += lower;
    }
    if (e < turns.num_experts) placed.first[e] = int32_t(placed.slots >= 0 ? e * placed.slots : row + up_to - kept);
    row += __shfl_sync(kAll, up_to, kWarp - 1);
  }
}

__global__ void __launch_bounds__(kWarp)
    number_kernel(const Turns turns, const int32_t* before, const Placed placed, int32_t* positions) {
  extern __shared__ int32_t next[];
  for (int e = threadIdx.x; e < turns.num_experts; e += kWarp) {
    next[e] = before[int64_t(blockIdx.x) * turns.num_experts + e];
  }
  __syncwarp();
  const int lane = threadIdx.x;
  const int64_t begin = blockIdx.x * turns.piece, end = min(begin + turns.piece, turns.num_tokens * turns.k);
  for (int64_t tile = begin; tile < end; tile += kWarp) {
    const bool inside = tile + lane < end;
    const int64_t route = inside ? turns.route_of(tile + lane) : 0;
    const int expert = inside ? max(turns.experts[route], -1) : -1;
    const unsigned same = __match_any_sync(kAll, expert);
    const int lower = __popc(same & ((1u << lane) - 1));
    const int number = expert >= 0 ? next[expert] + lower : 0;
    __syncwarp();
    if (expert >= 0 && lower == 0) next[expert] += __popc(same);
    __syncwarp();
    if (inside) positions[route] = expert >= 0 && number < placed.kept[expert] ? placed.first[expert] + number : -1;
  }
}

template <class A>
const A* typed(const std::optional<Tensor>& tensor) {
  return static_cast<const A*>(pointer_or_null(tensor));
}

unsigned blocks_of(int64_t num_tokens, int warps) { return unsigned((num_tokens + warps - 1) / warps); }

std::tuple<Tensor, Tensor, Tensor> route(Tensor logits, int64_t k, bool sigmoid, const std::optional<Tensor>& bias,
                                         int64_t groups) {
  const char* op = "moe_route";
  check_route(logits, k, groups, op);
  const torch::stable::accelerator::DeviceGuard guard(logits.get_device_index());
  const ScalarType wide = statistics_type(logits);
  const int64_t num_tokens = logits.size(0), num_experts = logits.size(1);
  if (!rows_are_dense(logits)) logits = torch::stable::contiguous(logits);
  const auto added = vector_argument(bias, num_experts, wide, logits, op, "bias");
  Tensor scores = torch::stable::new_empty(logits, {num_tokens, k}, wide);
  Tensor experts = torch::stable::new_empty(logits, {num_tokens, k}, ScalarType::Int);
  Tensor probs = torch::stable::new_empty(logits, {num_tokens, num_experts}, wide);
  if (num_tokens == 0) return {scores, experts, probs};
  with_type(dtype_of(logits, op), [&](auto type) {
    using S = decltype(type);
    using A = Wide<S>;
    const int64_t bytes = num_experts * int64_t(sizeof(typename KeyOf<A>::type));
    STD_TORCH_CHECK(bytes <= kSharedBytes, op, ": more than ", kSharedBytes / (bytes / num_experts), " experts");
    const int warps = int(std::min<int64_t>(kMaxWarps, kSharedBytes / bytes));
    const RouteArguments<S, A> arguments{static_cast<const S*>(logits.data_ptr()),
                                         logits.stride(0),
                                         num_tokens,
                                         int(num_experts),
                                         int(k),
                                         int(groups),
                                         sigmoid,
                                         typed<A>(added),
                                         static_cast<A*>(scores.data_ptr()),
                                         static_cast<int32_t*>(experts.data_ptr()),
                                         static_cast<A*>(probs.data_ptr())};
    route_kernel<S, A>
        <<<blocks_of(num_tokens, warps), warps * kWarp, size_t(warps * bytes), current_stream(logits)>>>(arguments);
    check_launch(op);
  });
  return {scores, experts, probs};
}

Tensor route_backward(const Tensor& probs, const Tensor& experts, const std::optional<Tensor>& dscores,
                      const std::optional<Tensor>& dprobs, bool sigmoid, int64_t groups, ScalarType type) {
  const char* op = "moe_route_backward";
  check_route(probs, experts.dim() == 2 ? experts.size(1) : 0, groups, op);
  const torch::stable::accelerator::DeviceGuard guard(probs.get_device_index());
  const int64_t num_tokens = probs.size(0), num_experts = probs.size(1), k = experts.size(1);
  Tensor dlogits = torch::stable::new_empty(probs, {num_tokens, num_experts}, type);
  const ScalarType wide = statistics_type(dlogits);
  const Tensor p = matrix_argument(probs, num_tokens, num_experts, wide, probs, op, "probs");
  const Tensor chosen = matrix_argument(experts, num_tokens, k, ScalarType::Int, probs, op, "experts");
  const auto of_scores = matrix_argument(dscores, num_tokens, k, wide, probs, op, "dscores");
  const auto of_probs = matrix_argument(dprobs, num_tokens, num_experts, wide, probs, op, "dprobs");
  if (num_tokens == 0) return dlogits;
  with_type(dtype_of(dlogits, op), [&](auto element) {
    using S = decltype(element);
    using A = Wide<S>;
    const RouteGradArguments<S, A> arguments{static_cast<const A*>(p.data_ptr()),
                                             static_cast<const int32_t*>(chosen.data_ptr()),
                                             typed<A>(of_scores),
                                             typed<A>(of_probs),
                                             num_tokens,
                                             int(num_experts),
                                             int(k),
                                             int(groups),
                                             sigmoid,
                                             static_cast<S*>(dlogits.data_ptr())};
    route_backward_kernel<S, A>
        <<<blocks_of(num_tokens, kMaxWarps), kMaxWarps * kWarp, 0, current_stream(probs)>>>(arguments);
    check_launch(op);
  });
  return dlogits;
}

std::tuple<Tensor, Tensor, Tensor> positions(const Tensor& experts, int64_t num_experts,
                                             const std::optional<Tensor>& capacity, std::optional<int64_t> slots,
                                             bool slot_major, const std::optional<Tensor>& order) {
  const char* op = "moe_positions";
  check_experts(experts, num_experts, slots, op);
  const size_t bytes = size_t(num_experts) * sizeof(int32_t);
  STD_TORCH_CHECK(int64_t(bytes) <= kSharedBytes, op, ": more than ", kSharedBytes / 4, " experts");
  const torch::stable::accelerator::DeviceGuard guard(experts.get_device_index());
  const cudaStream_t stream = current_stream(experts);
  const int64_t num_tokens = experts.size(0), k = experts.size(1), num_routes = num_tokens * k;
  const Tensor chosen = matrix_argument(experts, num_tokens, k, ScalarType::Int, experts, op, "experts");
  const auto capacities = vector_argument(capacity, num_experts, ScalarType::Long, experts, op, "capacity");
  const auto ordered = vector_argument(order, num_tokens, ScalarType::Long, experts, op, "order");
  Tensor result = torch::stable::new_empty(experts, {num_tokens, k});
  Tensor counts = torch::stable::new_zeros(experts, {num_experts}, ScalarType::Long);
  Tensor kept = torch::stable::new_zeros(experts, {num_experts}, ScalarType::Long);
  if (num_routes == 0) return {result, counts, kept};
  // 256 pieces keep every multiprocessor busy and the scan over them short.
  const int64_t piece = std::max<int64_t>(4 * kWarp, (num_routes + 255) / 256);
  const int64_t num_pieces = (num_routes + piece - 1) / piece;
  const Turns turns{static_cast<const int32_t*>(chosen.data_ptr()),
                    typed<int64_t>(ordered),
                    num_tokens,
                    k,
                    piece,
                    int(num_experts),
                    int(num_pieces),
                    slot_major};
  Tensor before = torch::stable::new_empty(experts, {num_pieces, num_experts});
  Tensor first = torch::stable::new_empty(experts, {num_experts});
  const Placed placed{typed<int64_t>(capacities), slots.value_or(-1), static_cast<int64_t*>(counts.data_ptr()),
                      static_cast<int64_t*>(kept.data_ptr()), static_cast<int32_t*>(first.data_ptr())};
  int32_t* pieces = static_cast<int32_t*>(before.data_ptr());
  count_kernel<<<unsigned(num_pieces), kWarp, bytes, stream>>>(turns, pieces);
  check_launch(op);
  place_kernel<<<1, int(std::min<int64_t>(1024, (num_experts + kWarp - 1) / kWarp * kWarp)), 0, stream>>>(turns, pieces,
                                                                                                        placed);
  check_launch(op);
  number_kernel<<<unsigned(num_pieces), kWarp, bytes, stream>>>(turns, pieces, placed,
                                                               static_cast<int32_t*>(result.data_ptr()));
  check_launch(op);
  return {result, counts, kept};
}

}  // namespace
}  // namespace whale::cuda

STABLE_TORCH_LIBRARY_IMPL(whale, CUDA, library) {
  library.impl("moe_route", TORCH_BOX(&whale::cuda::route));
  library.impl("moe_route_backward", TORCH_BOX(&whale::cuda::route_backward));
  library.impl("moe_positions", TORCH_BOX(&whale::cuda::positions));
}
