// crc32c on CPU: a checksum for each chunk, chunks on several threads.
#include <algorithm>

#include "../common/arguments.h"
#include "dispatch.h"

namespace whale::cpu {
namespace {

constexpr int64_t kGrainBytes = 1 << 20;  // bytes a thread takes at least

Tensor crc32c(const Tensor& data, int64_t chunk_bytes, int64_t start) {
  STD_TORCH_CHECK(data.is_cpu() && data.dim() == 1 && data.is_contiguous() && data.scalar_type() == ScalarType::Byte,
                  "crc32c: data is not 1-D contiguous bytes of this host");
  STD_TORCH_CHECK(chunk_bytes >= 1, "crc32c: chunks of ", chunk_bytes, " bytes");
  STD_TORCH_CHECK(start >= 0 && start <= UINT32_MAX, "crc32c: start ", start, " is not of 32 bits");
  const int64_t bytes = data.numel(), chunks = bytes / chunk_bytes + (bytes % chunk_bytes != 0);
  Tensor checksums = torch::stable::new_empty(data, {chunks}, ScalarType::Long);
  const uint8_t* from = static_cast<const uint8_t*>(data.const_data_ptr());
  int64_t* to = static_cast<int64_t*>(checksums.mutable_data_ptr());
  const Crc32c update = isa().crc32c;
  const int64_t grain = std::max<int64_t>(1, kGrainBytes / chunk_bytes);
  torch::stable::parallel_for(0, chunks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i * chunk_bytes;
      const uint32_t before = i == 0 ? uint32_t(start) : 0;
      to[i] = int64_t(~update(~before, from + first, std::min(chunk_bytes, bytes - first)) & UINT32_MAX);
    }
  });
  return checksums;
}

}  // namespace
}  // namespace whale::cpu

STABLE_TORCH_LIBRARY_IMPL(whale, CPU, library) { library.impl("crc32c", TORCH_BOX(&whale::cpu::crc32c)); }
