#include "dispatch.h"

#include <atomic>
#include <cstring>

namespace whale::cpu {
namespace {

// Carry-less products are in none of the levels of x86-64.
Crc32c best_of(const Crc32cLoops& loops) {
#ifdef WHALE_X86_64
  __builtin_cpu_init();
  const bool has_products = __builtin_cpu_supports("pclmul");
  if (loops.by_folding != nullptr && has_products && __builtin_cpu_supports("vpclmulqdq")) return loops.by_folding;
  if (loops.by_chains != nullptr && has_products) return loops.by_chains;
#endif
  return loops.by_tables;
}

#define WHALE_ISA_OF(NAME)                                                                                    \
  {                                                                                                           \
    #NAME, &NAME::bucket_loops, &NAME::softmax_loops, &NAME::routing_loops, &NAME::permutation_loops,         \
        &NAME::activation_loops, best_of(NAME::crc32c_loops)                                                  \
  }

struct Candidate {
  Isa isa;
  bool supported;
};

const Candidate* candidates(int* count) {
#ifdef WHALE_X86_64
  __builtin_cpu_init();
  static const bool has_v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                             __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  static const bool has_v4 = has_v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                             __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                             __builtin_cpu_supports("avx512vl");
  static const Candidate all[] = {
      {WHALE_ISA_OF(v4), has_v4},
      {WHALE_ISA_OF(v3), has_v3},
      {WHALE_ISA_OF(baseline), true},
  };
#else
  static const Candidate all[] = {{WHALE_ISA_OF(baseline), true}};
#endif
  *count = int(sizeof all / sizeof all[0]);
  return all;
}

const Isa* find(const char* name) {
  int count = 0;
  const Candidate* all = candidates(&count);
  for (int i = 0; i < count; ++i) {
    if (all[i].supported && (name == nullptr || std::strcmp(all[i].isa.name, name) == 0)) return &all[i].isa;
  }
  return nullptr;
}

std::atomic<const Isa*>& chosen() {
  static std::atomic<const Isa*> isa{find(nullptr)};
  return isa;
}

}  // namespace

const Isa& isa() { return *chosen().load(std::memory_order_relaxed); }

}  // namespace whale::cpu

// Called through ctypes: which instruction set runs, and (for tests) another one.
extern "C" __attribute__((visibility("default"))) const char* whale_cpu_isa() { return whale::cpu::isa().name; }

extern "C" __attribute__((visibility("default"))) int whale_cpu_use_isa(const char* name) {
  const whale::cpu::Isa* found = whale::cpu::find(name);
  if (found == nullptr) return 0;
  whale::cpu::chosen().store(found, std::memory_order_relaxed);
  return 1;
}
