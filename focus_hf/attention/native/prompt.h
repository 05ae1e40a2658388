// Sixteen consecutive queries share a list of keys, in which a bit for each says whether it reads the key. A vector's
// lanes are queries, so that nothing is gathered or turned.
#pragma once

#include "parallel.h"
#include "task.h"

constexpr int TILE = 64;  // keys between two looks at the largest score

// Scores of COUNT keys for all rows: rows are lanes, a key's numbers are spread over them one after the other.
template <int NV, int COUNT>
inline void products(const float* rows, const float* const* keys, int64_t dim, Vec out[COUNT][NV]) {
    for (int k = 0; k < COUNT; k++)
        for (int v = 0; v < NV; v++) out[k][v] = Vec{};
    for (int64_t d = 0; d < dim; d++, rows += NV * LANES)
        for (int k = 0; k < COUNT; k++) {
            const float number = keys[k][d];
            for (int v = 0; v < NV; v++) out[k][v] += number * load(rows + v * LANES);
        }
}

// Adds COUNT numbers of the values, weighted, to the rows' sums.
template <int NV, int COUNT>
inline void add_values(float* sums, const float* weights, const float* const* values, int64_t first, int64_t count) {
    Vec total[COUNT][NV];
    for (int c = 0; c < COUNT; c++)
        for (int v = 0; v < NV; v++) total[c][v] = load(sums + ((first + c) * NV + v) * LANES);
    for (int64_t key = 0; key < count; key++, weights += NV * LANES)
        for (int c = 0; c < COUNT; c++) {
            const float number = values[key][first + c];
            for (int v = 0; v < NV; v++) total[c][v] += number * load(weights + v * LANES);
        }
    for (int c = 0; c < COUNT; c++)
        for (int v = 0; v < NV; v++) store(sums + ((first + c) * NV + v) * LANES, total[c][v]);
}

// The rows of tokens as float32: where they lie, or widened.
inline void find_rows(const float* from, int64_t stride, const int32_t* index, int64_t count, int64_t, float*,
                      const float** rows) {
    for (int64_t key = 0; key < count; key++) rows[key] = from + index[key] * stride;
}

inline void find_rows(const bfloat16* from, int64_t stride, const int32_t* index, int64_t count, int64_t dim,
                      float* room, const float** rows) {
    for (int64_t key = 0; key < count; key++, room += dim) {
        for (int64_t d = 0; d < dim; d++) room[d] = number(from[index[key] * stride + d]);
        rows[key] = room;
    }
}

// NV vectors of rows: the rows of vector v are those of query head (start + v) * LANES / BLOCK.
template <class T, int NV>
void attend_rows(const Task& t, int64_t sequence, int64_t chooser, int64_t block, int64_t start, Room& room) {
    constexpr int COUNT = std::min(8, SUMS / NV), WIDTH = NV * LANES, OF_HEAD = BLOCK / LANES;
    const int64_t first = block * BLOCK, size = std::min<int64_t>(BLOCK, t.queries - first);
    const int64_t group = t.heads / t.choosers;
    const T* key = at<T>(t.key, t.of_key, sequence, chooser / t.of_key_head, 0);
    const T* value = at<T>(t.value, t.of_value, sequence, chooser / t.of_key_head, 0);
    room.rows.assign(t.dim * WIDTH, 0), room.sums.assign(t.value_dim * WIDTH, 0);
    room.scores.resize((TILE + COUNT) * WIDTH), room.wide.resize(TILE * (t.dim + t.value_dim));
    auto head_of = [&](int row) { return chooser * group + (start + row / LANES) / OF_HEAD; };
    auto query_of = [&](int row) { return (start + row / LANES) % OF_HEAD * LANES + row % LANES; };
    for (int row = 0; row < WIDTH; row++)
        if (query_of(row) < size) {
            const T* query = at<T>(t.query, t.of_query, sequence, head_of(row), first + query_of(row));
            for (int64_t d = 0; d < t.dim; d++) room.rows[d * WIDTH + row] = number(query[d]) * float(t.scale);
        }
    Ints bit[NV];
    Vec most[NV], total[NV];
    for (int v = 0; v < NV; v++) {
        for (int lane = 0; lane < LANES; lane++) bit[v][lane] = 1 << query_of(v * LANES + lane);
        most[v] = splat(NOTHING), total[v] = Vec{};
    }
    const float *keys[TILE + COUNT], *values[TILE];
    for (int64_t begin = 0; begin < room.keys.count; begin += TILE) {
        const int64_t count = std::min<int64_t>(TILE, room.keys.count - begin);
        const int32_t* index = room.keys.index.data() + begin;
        const uint16_t* readers = room.keys.readers.data() + begin;
        find_rows(key, t.of_key.token, index, count, t.dim, room.wide.data(), keys);
        find_rows(value, t.of_value.token, index, count, t.value_dim, room.wide.data() + TILE * t.dim, values);
        for (int k = 0; k < COUNT; k++) keys[count + k] = keys[0];
        Vec now[NV];
        for (int v = 0; v < NV; v++) now[v] = most[v];
        for (int64_t one = 0; one < count; one += COUNT) {
            Vec score[COUNT][NV];
            products<NV, COUNT>(room.rows.data(), keys + one, t.dim, score);
            for (int k = 0; k < COUNT; k++) {
                const int32_t who = one + k < count ? readers[one + k] : 0;
                for (int v = 0; v < NV; v++) {
                    const Vec seen = (bit[v] & who) != 0 ? score[k][v] : splat(HIDDEN);
                    now[v] = larger(now[v], seen);
                    store(room.scores.data() + (one + k) * WIDTH + v * LANES, seen);
                }
            }
        }
        for (int v = 0; v < NV; v++)
            if (any(now[v] > most[v])) {
                const Vec less = exponential(most[v] - now[v]);
                total[v] *= less, most[v] = now[v];
                for (int64_t d = 0; d < t.value_dim; d++) {
                    float* sums = room.sums.data() + d * WIDTH + v * LANES;
                    store(sums, load(sums) * less);
                }
            }
        for (int64_t one = 0; one < count; one++)
            for (int v = 0; v < NV; v++) {
                float* score = room.scores.data() + one * WIDTH + v * LANES;
                const Vec weight = exponential(load(score) - most[v]);
                total[v] += weight;
                store(score, weight);
            }
        int64_t d = 0;
        for (; d + COUNT <= t.value_dim; d += COUNT)
            add_values<NV, COUNT>(room.sums.data(), room.scores.data(), values, d, count);
        for (; d < t.value_dim; d++) add_values<NV, 1>(room.sums.data(), room.scores.data(), values, d, count);
    }
    for (int row = 0; row < WIDTH; row++) {
        const int v = row / LANES, lane = row % LANES;
        if (query_of(row) >= size) continue;
        float sum = total[v][lane];
        if (t.sink_logits) sum += std::exp(t.sink_logits[head_of(row)] - most[v][lane]);
        T* output = (T*)at<T>(t.output, t.of_output, sequence, head_of(row), first + query_of(row));
        for (int64_t d = 0; d < t.value_dim; d++) put(output + d, sum > 0 ? room.sums[d * WIDTH + row] / sum : 0);
    }
}

template <class T>
void attend_block(const Task& t, int64_t sequence, int64_t chooser, int64_t block, Room& room) {
    const int64_t first = block * BLOCK, size = std::min<int64_t>(BLOCK, t.queries - first);
    room.keys.find(t, at<uint8_t>(t.groups, t.of_groups, sequence, chooser / t.of_key_head, 0),
                   at<uint8_t>(t.reads, t.of_reads, sequence, chooser, first), t.keys - t.queries + first, size,
                   t.first(sequence));
    const int64_t vectors = t.heads / t.choosers * (BLOCK / LANES);
    const int64_t parts = (vectors + ROW_VECTORS - 1) / ROW_VECTORS;
    for (int64_t part = 0; part < parts; part++) {
        const int64_t start = part * vectors / parts, count = (part + 1) * vectors / parts - start;
        if (count == 1) attend_rows<T, 1>(t, sequence, chooser, block, start, room);
        if (count == 2) attend_rows<T, 2>(t, sequence, chooser, block, start, room);
        if (count == 3) attend_rows<T, 3>(t, sequence, chooser, block, start, room);
        if (count == 4) attend_rows<T, 4>(t, sequence, chooser, block, start, room);
    }
}

template <class T>
void attend_blocks(const Task& t) {
    const int64_t blocks = (t.queries + BLOCK - 1) / BLOCK, heads = t.batch * t.choosers;
    for_each<Room>(blocks * heads, t.threads, [&](int64_t item, Room& room) {  // the longest first
        attend_block<T>(t, item % heads / t.choosers, item % t.choosers, item / heads, room);
    });
}
