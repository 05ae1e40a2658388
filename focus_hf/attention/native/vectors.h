// Vectors of floats as wide as the machine's registers (GCC's and Clang's own; nothing is written for one processor).
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
constexpr int LANES = 16, ROW_VECTORS = 4, SUMS = 24;
#elif defined(__AVX__)
constexpr int LANES = 8, ROW_VECTORS = 3, SUMS = 12;
#else
constexpr int LANES = 4, ROW_VECTORS = 4, SUMS = 24;
#endif

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));

struct bfloat16 {
    uint16_t bits;
};

inline float number(float x) { return x; }

inline float number(bfloat16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}

inline void put(float* to, float x) { *to = x; }

inline void put(bfloat16* to, float x) {  // to the nearest, to even between two
    uint32_t bits;
    memcpy(&bits, &x, 4);
    to->bits = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline Vec load(const float* from) {
    Vec x;
    memcpy(&x, from, sizeof x);
    return x;
}

inline Vec load(const bfloat16* from) {
    Halves narrow;
    memcpy(&narrow, from, sizeof narrow);
    return (Vec)(__builtin_convertvector(narrow, Ints) << 16);
}

inline void store(float* to, Vec x) { memcpy(to, &x, sizeof x); }

inline Vec splat(float x) { return x - Vec{}; }

inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

inline bool any(Ints x) {
    int32_t found = 0;
    for (int lane = 0; lane < LANES; lane++) found |= x[lane];
    return found;
}

inline float sum(Vec x) {
    float part[LANES / 4][4];
    memcpy(part, &x, sizeof x);
    typedef float Four __attribute__((vector_size(16)));
    Four four = {};
    for (auto& some : part) four += Four{some[0], some[1], some[2], some[3]};
    return (four[0] + four[2]) + (four[1] + four[3]);
}

// e^x to one part in ten million, 0 below -87 (Cephes' polynomial).
inline Vec exponential(Vec x) {
    const float to_integers = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded
    Vec shifted = x * 1.44269504f + to_integers, power = shifted - to_integers;
    Vec rest = (x - power * 0.693359375f) + power * 2.12194440e-4f;
    Vec p = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * rest + 8.3334519073e-3f;
    p = p * rest + 4.1665795894e-2f;
    p = p * rest + 1.6666665459e-1f;
    p = p * rest + 5.0000001201e-1f;
    p = p * rest * rest + rest + 1.0f;
    return x < -87.0f ? Vec{} : (Vec)((Ints)p + ((Ints)shifted << 23));
}
