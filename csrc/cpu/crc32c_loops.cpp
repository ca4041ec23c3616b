// CRC32C of a run of bytes. Compiled once for each instruction set (WHALE_ISA): by tables, by three chains of the crc32
// instruction, or by products of polynomials of 512 bits. The checksum comes and goes without its final inversion.
#include "../common/crc32c.h"
#include "loops.h"

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace whale::cpu::WHALE_ISA {

static constexpr SliceTables kTables;

WHALE_MATH uint32_t load_32(const uint8_t* p) {
  return uint32_t(p[0]) | uint32_t(p[1]) << 8 | uint32_t(p[2]) << 16 | uint32_t(p[3]) << 24;
}

WHALE_MATH uint32_t slice(uint32_t word, int last) {
  return kTables.of[last + 3][word & 0xff] ^ kTables.of[last + 2][word >> 8 & 0xff] ^
         kTables.of[last + 1][word >> 16 & 0xff] ^ kTables.of[last][word >> 24];
}

static uint32_t by_tables(uint32_t crc, const uint8_t* p, int64_t bytes) {
  for (; bytes >= kSlices; p += kSlices, bytes -= kSlices) {
    crc = slice(load_32(p) ^ crc, 12) ^ slice(load_32(p + 4), 8) ^ slice(load_32(p + 8), 4) ^ slice(load_32(p + 12), 0);
  }
  for (; bytes > 0; ++p, --bytes) crc = (crc >> 8) ^ kTables.of[0][(crc ^ *p) & 0xff];
  return crc;
}

#ifdef __AVX2__

#define WHALE_CHAINS __attribute__((target("sse4.2,pclmul")))

WHALE_MATH uint64_t load_64(const uint8_t* p) {
  uint64_t word;
  memcpy(&word, p, sizeof word);
  return word;
}

// Of 64 bits, the product of crc and a power of x that is 33 below the wanted one: the reflected product is short by one,
// and the checksum of the word is another 32.
WHALE_CHAINS static inline uint64_t shifted(uint32_t crc, uint32_t power) {
  const __m128i product = _mm_clmulepi64_si128(_mm_cvtsi32_si128(int(crc)), _mm_cvtsi32_si128(int(power)), 0);
  return uint64_t(_mm_cvtsi128_si64(product));
}

// The instruction takes three cycles and one can begin every cycle: three parts, each of so many bytes, side by side.
// Of long parts the next three are asked for ahead, as what the machine foresees by itself ends with each page.
template <int64_t kPart>
WHALE_CHAINS static inline void three_chains(uint32_t& crc, const uint8_t*& p, int64_t& bytes) {
  constexpr uint32_t one = power_of_x(8 * kPart - 33), two = power_of_x(16 * kPart - 33);
  for (; bytes >= 3 * kPart; p += 3 * kPart, bytes -= 3 * kPart) {
    uint64_t a = crc, b = 0, c = 0;
    for (int64_t i = 0; i < kPart; i += 8) {
      if (kPart >= 4096 && i % 64 == 0) {
        for (int64_t part = 3; part < 6; ++part) _mm_prefetch(p + part * kPart + i, _MM_HINT_T0);
      }
      a = _mm_crc32_u64(a, load_64(p + i));
      b = _mm_crc32_u64(b, load_64(p + kPart + i));
      c = _mm_crc32_u64(c, load_64(p + 2 * kPart + i));
    }
    crc = uint32_t(c) ^ uint32_t(_mm_crc32_u64(0, shifted(uint32_t(a), two) ^ shifted(uint32_t(b), one)));
  }
}

WHALE_CHAINS static uint32_t by_chains(uint32_t crc, const uint8_t* p, int64_t bytes) {
  three_chains<4096>(crc, p, bytes);
  three_chains<256>(crc, p, bytes);
  three_chains<32>(crc, p, bytes);
  for (; bytes >= 8; p += 8, bytes -= 8) crc = uint32_t(_mm_crc32_u64(crc, load_64(p)));
  for (; bytes > 0; ++p, --bytes) crc = _mm_crc32_u8(crc, *p);
  return crc;
}

#endif

#ifdef __AVX512F__

#define WHALE_FOLD __attribute__((target("sse4.2,pclmul,vpclmulqdq")))

// What carries 128 bits over so many bits: the first 64 of them in memory stand 64 higher, the reflected product is
// short by one, and the power lies in the upper half of its word.
struct Carry {
  uint64_t first, second;
  consteval explicit Carry(int64_t bits)
      : first(uint64_t(power_of_x(bits + 63)) << 32), second(uint64_t(power_of_x(bits - 1)) << 32) {}
};

WHALE_FOLD static inline __m512i lanes_of(Carry carry) {
  return _mm512_set_epi64(int64_t(carry.second), int64_t(carry.first), int64_t(carry.second), int64_t(carry.first),
                          int64_t(carry.second), int64_t(carry.first), int64_t(carry.second), int64_t(carry.first));
}

WHALE_FOLD static inline __m512i carried(__m512i x, __m512i carry, __m512i onto) {
  constexpr int kXor3 = 0x96;
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(x, carry, 0x00), _mm512_clmulepi64_epi128(x, carry, 0x11),
                                   onto, kXor3);
}

WHALE_FOLD static inline __m128i carried(__m128i x, Carry carry, __m128i onto) {
  const __m128i by = _mm_set_epi64x(int64_t(carry.second), int64_t(carry.first));
  return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(x, by, 0x00), _mm_clmulepi64_si128(x, by, 0x11)), onto);
}

constexpr int kVectors = 8;  // products under way: more than their latency, few enough for the registers
constexpr int64_t kVector = 64, kRun = kVectors * kVector;

WHALE_FOLD static uint32_t by_folding(uint32_t crc, const uint8_t* p, int64_t bytes) {
  if (bytes < kRun) return by_chains(crc, p, bytes);
  __m512i x[kVectors];
  for (int i = 0; i < kVectors; ++i) x[i] = _mm512_loadu_si512(p + i * kVector);
  x[0] = _mm512_xor_si512(x[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(int(crc))));
  p += kRun;
  bytes -= kRun;
  const __m512i over_run = lanes_of(Carry(8 * kRun)), over_vector = lanes_of(Carry(8 * kVector));
  for (; bytes >= kRun; p += kRun, bytes -= kRun) {
    for (int i = 0; i < kVectors; ++i) x[i] = carried(x[i], over_run, _mm512_loadu_si512(p + i * kVector));
  }
  __m512i sum = x[0];
  for (int i = 1; i < kVectors; ++i) sum = carried(sum, over_vector, x[i]);
  for (; bytes >= kVector; p += kVector, bytes -= kVector) {
    sum = carried(sum, over_vector, _mm512_loadu_si512(p));
  }
  __m128i lanes[4];
  _mm512_storeu_si512(lanes, sum);
  const __m128i last = carried(lanes[0], Carry(384), carried(lanes[1], Carry(256), carried(lanes[2], Carry(128), lanes[3])));
  crc = uint32_t(_mm_crc32_u64(0, uint64_t(_mm_cvtsi128_si64(last))));
  crc = uint32_t(_mm_crc32_u64(crc, uint64_t(_mm_extract_epi64(last, 1))));
  return by_chains(crc, p, bytes);
}

#endif

extern const Crc32cLoops crc32c_loops = {
    by_tables,
#ifdef __AVX2__
    by_chains,
#else
    nullptr,
#endif
#ifdef __AVX512F__
    by_folding,
#else
    nullptr,
#endif
};

}  // namespace whale::cpu::WHALE_ISA
