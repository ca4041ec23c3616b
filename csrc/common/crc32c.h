// The polynomials behind CRC32C, all at compile time. A word's lowest bit is its highest power of x (RFC 3720).
#pragma once

#include <cstdint>

namespace whale {

// x^32 modulo this is P: Castagnoli's 0x1EDC6F41 with its bits reversed.
constexpr uint32_t kCastagnoli = 0x82f63b78;

// The product by x modulo P.
consteval uint32_t times_x(uint32_t a) { return (a >> 1) ^ (a & 1 ? kCastagnoli : 0); }

consteval uint32_t times(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (int i = 31; i >= 0; --i) {
    if (b >> i & 1) product ^= a;
    a = times_x(a);
  }
  return product;
}

// x^exponent modulo P.
consteval uint32_t power_of_x(int64_t exponent) {
  uint32_t power = 1u << 31, square = 1u << 30;
  for (; exponent != 0; exponent >>= 1) {
    if (exponent & 1) power = times(power, square);
    square = times(square, square);
  }
  return power;
}

constexpr int kSlices = 16;

// of[k][b]: the checksum of byte b and k zero bytes behind it.
struct SliceTables {
  uint32_t of[kSlices][256];

  consteval SliceTables() : of() {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      uint32_t crc = byte;
      for (int bit = 0; bit < 8; ++bit) crc = times_x(crc);
      of[0][byte] = crc;
    }
    for (int k = 1; k < kSlices; ++k) {
      for (int byte = 0; byte < 256; ++byte) of[k][byte] = (of[k - 1][byte] >> 8) ^ of[0][of[k - 1][byte] & 0xff];
    }
  }
};

}  // namespace whale
