// bucket_pack, bucket_unpack, bucket_amax on CPU. Threads share the elements of all tensors evenly, whatever their sizes.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "../common/arguments.h"
#include "dispatch.h"

namespace whale::cpu {
namespace {

constexpr int64_t kGrain = 32768;  // elements a thread takes at least

// A tensor's memory with neighbouring dims joined where their strides allow; one dim of stride 1 is dense.
struct Memory {
  char* data;
  Dtype dtype;
  int64_t numel;
  std::vector<int64_t> sizes, strides;

  bool dense() const { return sizes.empty(); }
  Strided layout() const { return {sizes.data(), strides.data(), int(sizes.size())}; }
};

// any_order: the caller does not mind in which order the elements come, so channels-last memory is dense too.
Memory memory_of(const Tensor& tensor, const char* op, bool any_order) {
  Memory memory{static_cast<char*>(tensor.data_ptr()), dtype_of(tensor, op), tensor.numel(), {}, {}};
  if (memory.numel == 0 || tensor.is_contiguous()) return memory;
  std::vector<std::pair<int64_t, int64_t>> dims;  // (stride, size)
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) != 1) dims.emplace_back(tensor.stride(d), tensor.size(d));
  }
  if (any_order) std::stable_sort(dims.begin(), dims.end(), [](auto a, auto b) { return a.first > b.first; });
  for (const auto& [stride, size] : dims) {
    if (!memory.sizes.empty() && memory.strides.back() == stride * size) {
      memory.sizes.back() *= size;
      memory.strides.back() = stride;
    } else {
      memory.sizes.push_back(size);
      memory.strides.push_back(stride);
    }
  }
  if (memory.sizes.size() == 1 && memory.strides[0] == 1) {
    memory.sizes.clear();
    memory.strides.clear();
  }
  return memory;
}

std::vector<Memory> memories_of(const std::vector<Tensor>& tensors, const char* op, bool any_order) {
  std::vector<Memory> memories;
  memories.reserve(tensors.size());
  for (const Tensor& tensor : tensors) {
    STD_TORCH_CHECK(tensor.is_cpu(), op, ": tensors on two devices");
    memories.push_back(memory_of(tensor, op, any_order));
  }
  return memories;
}

// Calls work(tensor, begin, count) for pieces that cover every element of every tensor once, on several threads.
template <class Work>
void for_each_piece(const std::vector<Memory>& memories, const Work& work) {
  std::vector<int64_t> ends;
  ends.reserve(memories.size());
  int64_t total = 0;
  for (const Memory& memory : memories) ends.push_back(total += memory.numel);
  torch::stable::parallel_for(0, total, kGrain, [&](int64_t begin, int64_t end) {
    size_t tensor = std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin();
    while (begin < end) {
      const int64_t stop = std::min(end, ends[tensor]);
      const int64_t first = ends[tensor] - memories[tensor].numel;
      if (stop > begin) work(tensor, begin - first, stop - begin);
      begin = std::max(begin, stop);
      ++tensor;
    }
  });
}

void pack(const std::vector<Tensor>& tensors, const std::vector<int64_t>& offsets, const Tensor& flat, double scale) {
  check_bucket(flat, tensors.size(), offsets, "bucket_pack");
  const Dtype to = dtype_of(flat, "bucket_pack");
  const int64_t length = flat.numel();
  const auto memories = memories_of(tensors, "bucket_pack", false);
  for (size_t i = 0; i < memories.size(); ++i) check_place(i, memories[i].numel, offsets[i], length, "bucket_pack");
  char* bucket = static_cast<char*>(flat.mutable_data_ptr());
  const BucketLoops& loops = *isa().bucket;
  for_each_piece(memories, [&](size_t i, int64_t begin, int64_t count) {
    const Memory& from = memories[i];
    char* destination = bucket + (offsets[i] + begin) * kElementBytes[to];
    if (from.dense()) {
      loops.cast[from.dtype][to](from.data + begin * kElementBytes[from.dtype], destination, count, scale);
    } else {
      loops.gather[from.dtype][to](from.data, from.layout(), begin, destination, count, scale);
    }
  });
}

Tensor unpack(const Tensor& flat, const std::vector<int64_t>& offsets, const std::vector<Tensor>& tensors, double scale) {
  check_bucket(flat, tensors.size(), offsets, "bucket_unpack");
  const Dtype from = dtype_of(flat, "bucket_unpack");
  const int64_t length = flat.numel();
  const auto memories = memories_of(tensors, "bucket_unpack", false);
  for (size_t i = 0; i < memories.size(); ++i) check_place(i, memories[i].numel, offsets[i], length, "bucket_unpack");
  const char* bucket = static_cast<const char*>(flat.const_data_ptr());
  const BucketLoops& loops = *isa().bucket;
  std::atomic<bool> found{false};
  for_each_piece(memories, [&](size_t i, int64_t begin, int64_t count) {
    const Memory& to = memories[i];
    const char* source = bucket + (offsets[i] + begin) * kElementBytes[from];
    const bool any = to.dense()
                         ? loops.cast_checked[from][to.dtype](source, to.data + begin * kElementBytes[to.dtype], count, scale)
                         : loops.scatter[from][to.dtype](source, to.data, to.layout(), begin, count, scale);
    if (any) found.store(true, std::memory_order_relaxed);
  });
  Tensor result = torch::stable::new_empty(flat, {}, ScalarType::Float);
  *static_cast<float*>(result.mutable_data_ptr()) = found.load() ? 1.0f : 0.0f;
  return result;
}

Tensor amax(const std::vector<Tensor>& tensors) {
  const auto memories = memories_of(tensors, "bucket_amax", true);
  const BucketLoops& loops = *isa().bucket;
  std::atomic<uint32_t> most{0};
  for_each_piece(memories, [&](size_t i, int64_t begin, int64_t count) {
    const Memory& from = memories[i];
    uint32_t bits = 0;
    if (from.dense()) {
      bits = loops.largest[from.dtype](from.data + begin * kElementBytes[from.dtype], count);
    } else {
      constexpr int64_t kPiece = 1024;
      float piece[kPiece];
      for (int64_t done = 0; done < count; done += kPiece) {
        const int64_t length = std::min(kPiece, count - done);
        loops.gather[from.dtype][kFloat](from.data, from.layout(), begin + done, piece, length, 1.0);
        bits = std::max(bits, loops.largest[kFloat](piece, length));
      }
    }
    uint32_t seen = most.load(std::memory_order_relaxed);
    while (seen < bits && !most.compare_exchange_weak(seen, bits)) {
    }
  });
  Tensor result = torch::stable::new_empty(tensors[0], {}, ScalarType::Float);
  const uint32_t bits = most.load();
  std::memcpy(result.mutable_data_ptr(), &bits, sizeof bits);
  return result;
}

}  // namespace
}  // namespace whale::cpu

STABLE_TORCH_LIBRARY_IMPL(whale, CPU, library) {
  library.impl("bucket_pack", TORCH_BOX(&whale::cpu::pack));
  library.impl("bucket_unpack", TORCH_BOX(&whale::cpu::unpack));
  library.impl("bucket_amax", TORCH_BOX(&whale::cpu::amax));
}
