// copy_blocks, post_flag, await_flags: memory that processes of one host share. A flag is one cache line of int32: its
// number, and how many processes sleep on it. They sleep in the kernel (futex), since a host may have more ranks than cores.
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "../common/arguments.h"

namespace whale::cpu {
namespace {

constexpr int64_t kFlagNumbers = 16;
constexpr int kSpins = 400;                // a few microseconds: less than the kernel takes to wake a process
constexpr int64_t kGrainBytes = 1 << 20;  // bytes a thread copies at least

void copy_blocks(const Tensor& source, const Tensor& blocks, const Tensor& target) {
  for (const Tensor* bytes : {&source, &target}) {
    STD_TORCH_CHECK(bytes->is_cpu() && bytes->dim() == 1 && bytes->is_contiguous() &&
                        bytes->scalar_type() == ScalarType::Byte,
                    "copy_blocks: source and target are 1-D contiguous bytes of this host");
  }
  STD_TORCH_CHECK(blocks.is_cpu() && blocks.dim() == 2 && blocks.size(1) == 3 && blocks.is_contiguous() &&
                      blocks.scalar_type() == ScalarType::Long,
                  "copy_blocks: blocks are not [n, 3] of int64");
  const int64_t count = blocks.size(0), source_bytes = source.numel(), target_bytes = target.numel();
  const int64_t* numbers = static_cast<const int64_t*>(blocks.const_data_ptr());
  std::vector<int64_t> ends;
  ends.reserve(count);
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t start = numbers[3 * i], to = numbers[3 * i + 1], size = numbers[3 * i + 2];
    STD_TORCH_CHECK(size >= 0 && start >= 0 && start <= source_bytes - size && to >= 0 && to <= target_bytes - size,
                    "copy_blocks: block ", i, " is outside of source or target");
    ends.push_back(total += size);
  }
  const char* from = static_cast<const char*>(source.const_data_ptr());
  char* into = static_cast<char*>(target.mutable_data_ptr());
  torch::stable::parallel_for(0, total, kGrainBytes, [&](int64_t begin, int64_t end) {
    int64_t i = std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin();
    while (begin < end) {
      const int64_t size = numbers[3 * i + 2], done = begin - (ends[i] - size), length = std::min(end, ends[i]) - begin;
      std::memcpy(into + numbers[3 * i + 1] + done, from + numbers[3 * i] + done, length);
      begin += length;
      ++i;
    }
  });
}

struct Flag {
  std::atomic<int32_t> number;
  std::atomic<int32_t> sleepers;
};
static_assert(std::atomic<int32_t>::is_always_lock_free && sizeof(Flag) == 8, "a flag is plain memory");

Flag* flag_at(const Tensor& flags, int64_t place, const char* op) {
  STD_TORCH_CHECK(flags.is_cpu() && flags.dim() == 2 && flags.size(1) == kFlagNumbers && flags.is_contiguous() &&
                      flags.scalar_type() == ScalarType::Int,
                  op, ": flags are not [places, 16] of int32 of this host");
  STD_TORCH_CHECK(place >= 0 && place < flags.size(0), op, ": no flag ", place, " among ", flags.size(0));
  return reinterpret_cast<Flag*>(static_cast<int32_t*>(flags.mutable_data_ptr()) + place * kFlagNumbers);
}

void futex(Flag* flag, int operation, int32_t value, const timespec* timeout) {
  syscall(SYS_futex, reinterpret_cast<int32_t*>(&flag->number), operation, value, timeout, nullptr, 0);
}

void pause() {
#ifdef WHALE_X86_64
  __builtin_ia32_pause();
#endif
}

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000 + now.tv_nsec;
}

// Numbers count on past the largest, so their difference says which is later.
bool reached(int32_t number, int32_t wanted) { return int32_t(uint32_t(number) - uint32_t(wanted)) >= 0; }

void post_flag(const Tensor& flags, int64_t place, int64_t number) {
  Flag* flag = flag_at(flags, place, "post_flag");
  // Sequentially consistent, here and where one goes to sleep: either the sleeper sees the number or we see the sleeper.
  flag->number.store(int32_t(number));
  if (flag->sleepers.load() != 0) futex(flag, FUTEX_WAKE, INT32_MAX, nullptr);
}

bool await_flag(Flag* flag, int32_t wanted, int64_t deadline_ns) {
  for (int spin = 0; spin < kSpins; ++spin) {
    if (reached(flag->number.load(std::memory_order_acquire), wanted)) return true;
    pause();
  }
  flag->sleepers.fetch_add(1);
  int32_t number = flag->number.load();
  while (!reached(number, wanted)) {
    const int64_t left = deadline_ns - now_ns();
    if (left <= 0) break;
    const timespec timeout{time_t(left / 1'000'000'000), long(left % 1'000'000'000)};
    futex(flag, FUTEX_WAIT, number, &timeout);
    number = flag->number.load();
  }
  flag->sleepers.fetch_sub(1);
  return reached(number, wanted);
}

Tensor await_flags(const Tensor& flags, const std::vector<int64_t>& places, int64_t number, int64_t timeout_ms) {
  const int64_t deadline_ns = now_ns() + timeout_ms * 1'000'000;
  Tensor late = torch::stable::new_empty(flags, {}, ScalarType::Long);
  int64_t* result = static_cast<int64_t*>(late.mutable_data_ptr());
  *result = -1;
  for (const int64_t place : places) {
    if (await_flag(flag_at(flags, place, "await_flags"), int32_t(number), deadline_ns)) continue;
    *result = place;
    break;
  }
  return late;
}

}  // namespace
}  // namespace whale::cpu

STABLE_TORCH_LIBRARY_IMPL(whale, CPU, library) {
  library.impl("copy_blocks", TORCH_BOX(&whale::cpu::copy_blocks));
  library.impl("post_flag", TORCH_BOX(&whale::cpu::post_flag));
  library.impl("await_flags", TORCH_BOX(&whale::cpu::await_flags));
}
