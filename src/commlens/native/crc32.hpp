// zlib's CRC-32, eight bytes at a time.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

namespace commlens {

namespace detail {
using CrcTables = std::array<std::array<uint32_t, 256>, 8>;

inline CrcTables crc_tables() {
  CrcTables tables{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) ? 0xEDB88320u : 0u);
    tables[0][i] = value;
  }
  for (size_t table = 1; table < 8; ++table)
    for (size_t i = 0; i < 256; ++i) tables[table][i] = (tables[table - 1][i] >> 8) ^ tables[0][tables[table - 1][i] & 0xFF];
  return tables;
}

inline const CrcTables crc_table = crc_tables();
}  // namespace detail

// Continues from `crc`, as zlib.crc32(data, crc) does.
inline uint32_t crc32(const void* data, size_t size, uint32_t crc = 0) {
  const auto& t = detail::crc_table;
  const auto* bytes = static_cast<const unsigned char*>(data);
  crc = ~crc;
  for (; size >= 8; bytes += 8, size -= 8) {
    uint64_t word;
    std::memcpy(&word, bytes, 8);
    word ^= crc;
    crc = t[7][word & 0xFF] ^ t[6][(word >> 8) & 0xFF] ^ t[5][(word >> 16) & 0xFF] ^ t[4][(word >> 24) & 0xFF] ^
          t[3][(word >> 32) & 0xFF] ^ t[2][(word >> 40) & 0xFF] ^ t[1][(word >> 48) & 0xFF] ^ t[0][word >> 56];
  }
  for (; size; ++bytes, --size) crc = (crc >> 8) ^ t[0][(crc ^ *bytes) & 0xFF];
  return ~crc;
}

}  // namespace commlens
