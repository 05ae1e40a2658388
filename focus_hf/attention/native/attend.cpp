// Focus attention on a CPU: each query attends to the keys that it reads, where they lie.
//
// Keys of a query are found by their groups, one byte each. Sixteen consecutive queries share a list of keys, in which
// a bit for each says whether it reads the key; a vector's lanes are queries, so that nothing is gathered or turned.
#include <algorithm>
#include <cmath>
#include <vector>

#include "vectors.h"

constexpr int BLOCK = 16;                    // queries that share a list
constexpr int TILE = 64;                     // keys between two looks at the largest score
constexpr int64_t SPAN = 2048;               // keys that one piece of work for a single query looks at
constexpr int64_t AHEAD = 8, LINE = 64;       // keys that are asked for before they are wanted; bytes of a cache line
constexpr float NOTHING = -1e20f, HIDDEN = -1e30f;

struct Strides {
    int64_t sequence, head, token;
};

// Mirrored by `Task` in attend.py.
struct Task {
    const void *query, *key, *value;
    const uint8_t *groups, *reads;
    const float* sink_logits;  // of each query head, or null
    void* output;
    Strides of_query, of_key, of_value, of_groups, of_reads, of_output;
    int64_t batch, heads, kv_heads, queries, keys, dim, value_dim, cells, bands;
    int64_t window, sinks, dense, threads, narrow;  // sinks, dense: counted from the first key; narrow: bfloat16
    double scale;

    int64_t begin(int64_t band) const { return band ? std::max<int64_t>(window, 1) << band : window; }
    int64_t end(int64_t band) const { return band + 1 < bands ? begin(band + 1) : INT64_MAX / 2; }
};

template <class T>
const T* at(const void* tensor, const Strides& s, int64_t sequence, int64_t head, int64_t token) {
    return (const T*)tensor + sequence * s.sequence + head * s.head + token * s.token;
}

// The keys that some queries read, in order, and which of the queries do.
struct Keys {
    std::vector<int32_t> index;
    std::vector<uint16_t> readers, of_cell;
    int64_t count = 0;

    void add(int64_t key, uint16_t who) {
        index[count] = key;
        readers[count] = who;
        count += who != 0;
    }

    static uint16_t bits(int64_t from, int64_t to, int64_t size) {  // of the queries from .. to
        from = std::max<int64_t>(from, 0), to = std::min(to, size - 1);
        return from > to ? 0 : uint16_t((2u << to) - (1u << from));
    }

    // Of queries `first .. first + size - 1`, counted among the keys, to a head's groups.
    void find(const Task& task, const uint8_t* groups, const uint8_t* reads, int64_t first, int64_t size) {
        index.resize(task.keys + 1), readers.resize(task.keys + 1), of_cell.assign(task.cells, 0);
        count = 0;
        for (int64_t query = 0; query < size; query++, reads += task.of_reads.token)
            for (int64_t cell = 0; cell < task.cells; cell++) of_cell[cell] |= uint16_t(reads[cell]) << query;
        const uint16_t dense = bits(0, task.dense - 1 - first, size);
        if (dense)
            for (auto& who : of_cell) who |= dense;
        const int64_t last = first + size - 1;
        int64_t key = 0;
        for (; key < std::min(task.sinks, last + 1); key++) add(key, bits(key - first, size, size));
        for (int64_t band = task.bands - 1; band >= 0; band--) {  // where all queries agree on the band
            const int64_t from = std::max(key, last - task.end(band)), to = first - task.begin(band);
            if (from >= to) continue;
            for (; key < from; key++) one_by_one(task, groups, first, size, key, dense);
            const uint16_t* who = of_cell.data() + band;
            const int64_t stride = task.of_groups.token;
            for (; key < to; key++) add(key, who[groups[key * stride] * task.bands]);
        }
        for (; key <= last; key++) one_by_one(task, groups, first, size, key, dense);
    }

    void one_by_one(const Task& task, const uint8_t* groups, int64_t first, int64_t size, int64_t key, uint16_t dense) {
        const int64_t ago = key - first;
        uint16_t who = bits(ago, ago + task.window, size) | (dense & bits(ago, size, size));
        const uint16_t* cell = of_cell.data() + groups[key * task.of_groups.token] * task.bands;
        for (int64_t band = 0; band < task.bands; band++)
            who |= cell[band] & bits(ago + task.begin(band) + 1, ago + task.end(band), size);
        add(key, who);
    }
};

// -- sixteen queries

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

struct Room {  // of one thread
    Keys keys;
    std::vector<float> rows, scores, sums, wide;
};

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
void attend_rows(const Task& t, int64_t sequence, int64_t kv_head, int64_t block, int64_t start, Room& room) {
    constexpr int COUNT = std::min(8, SUMS / NV), WIDTH = NV * LANES, OF_HEAD = BLOCK / LANES;
    const int64_t first = block * BLOCK, size = std::min<int64_t>(BLOCK, t.queries - first);
    const int64_t group = t.heads / t.kv_heads;
    const T* key = at<T>(t.key, t.of_key, sequence, kv_head, 0);
    const T* value = at<T>(t.value, t.of_value, sequence, kv_head, 0);
    room.rows.assign(t.dim * WIDTH, 0), room.sums.assign(t.value_dim * WIDTH, 0);
    room.scores.resize((TILE + COUNT) * WIDTH), room.wide.resize(TILE * (t.dim + t.value_dim));
    auto head_of = [&](int row) { return kv_head * group + (start + row / LANES) / OF_HEAD; };
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
void attend_block(const Task& t, int64_t sequence, int64_t kv_head, int64_t block, Room& room) {
    const int64_t first = block * BLOCK, size = std::min<int64_t>(BLOCK, t.queries - first);
    room.keys.find(t, at<uint8_t>(t.groups, t.of_groups, sequence, kv_head, 0),
                   at<uint8_t>(t.reads, t.of_reads, sequence, kv_head, first), t.keys - t.queries + first, size);
    const int64_t vectors = t.heads / t.kv_heads * (BLOCK / LANES);
    const int64_t parts = (vectors + ROW_VECTORS - 1) / ROW_VECTORS;
    for (int64_t part = 0; part < parts; part++) {
        const int64_t start = part * vectors / parts, count = (part + 1) * vectors / parts - start;
        if (count == 1) attend_rows<T, 1>(t, sequence, kv_head, block, start, room);
        if (count == 2) attend_rows<T, 2>(t, sequence, kv_head, block, start, room);
        if (count == 3) attend_rows<T, 3>(t, sequence, kv_head, block, start, room);
        if (count == 4) attend_rows<T, 4>(t, sequence, kv_head, block, start, room);
    }
}

template <class T>
void attend_blocks(const Task& t) {
    const int64_t blocks = (t.queries + BLOCK - 1) / BLOCK, heads = t.batch * t.kv_heads;
#pragma omp parallel num_threads(t.threads)
    {
        Room room;
#pragma omp for schedule(dynamic)
        for (int64_t item = blocks * heads - 1; item >= 0; item--)  // the longest first
            attend_block<T>(t, item % heads / t.kv_heads, item % t.kv_heads, item / heads, room);
    }
}

// -- a single query: a vector's lanes are numbers of a token

// Which of some keys the newest token reads.
int64_t find_keys(const Task& t, const uint8_t* groups, const uint8_t* reads, int64_t begin, int64_t end,
                  int32_t* index) {
    const int64_t query = t.keys - 1, near = t.dense > query ? 0 : std::max<int64_t>(0, query - t.window);
    int64_t count = 0, key = begin;
    for (; key < std::min({end, t.sinks, near}); key++) index[count++] = key;
    for (int64_t band = t.bands - 1; band >= 0; band--)
        for (; key < std::min({end, near, query - t.begin(band)}); key++) {
            index[count] = key;
            count += reads[groups[key * t.of_groups.token] * t.bands + band] != 0;
        }
    for (; key < end; key++) index[count++] = key;
    return count;
}

// What HEADS query heads find among some keys: of each its largest score, the sum of weights, and the weighted values.
template <class T, int HEADS>
void attend_keys(const Task& t, int64_t sequence, int64_t kv_head, int64_t start, const int32_t* index, int64_t count,
                 Room& room, float* found) {
    const T* key = at<T>(t.key, t.of_key, sequence, kv_head, 0);
    const T* value = at<T>(t.value, t.of_value, sequence, kv_head, 0);
    const int64_t whole = t.dim / LANES * LANES, width = (count + LANES - 1) / LANES * LANES;
    room.rows.resize(HEADS * t.dim), room.scores.resize(HEADS * width);
    for (int h = 0; h < HEADS; h++) {
        const T* query = at<T>(t.query, t.of_query, sequence, start + h, 0);
        for (int64_t d = 0; d < t.dim; d++) room.rows[h * t.dim + d] = number(query[d]) * float(t.scale);
    }
    for (int64_t k = 0; k < count; k++) {
        const T* one = key + index[k] * t.of_key.token;
        if (k + AHEAD < count)
            for (int64_t d = 0; d < t.dim; d += LINE / sizeof(T))
                __builtin_prefetch(key + index[k + AHEAD] * t.of_key.token + d);
        Vec part[HEADS] = {};
        for (int64_t d = 0; d < whole; d += LANES) {
            const Vec numbers = load(one + d);
            for (int h = 0; h < HEADS; h++) part[h] += numbers * load(room.rows.data() + h * t.dim + d);
        }
        for (int h = 0; h < HEADS; h++) {
            float score = sum(part[h]);
            for (int64_t d = whole; d < t.dim; d++) score += number(one[d]) * room.rows[h * t.dim + d];
            room.scores[h * width + k] = score;
        }
    }
    for (int h = 0; h < HEADS; h++) {
        float* score = room.scores.data() + h * width;
        for (int64_t k = count; k < width; k++) score[k] = HIDDEN;
        Vec most = splat(NOTHING), total = {};
        for (int64_t k = 0; k < width; k += LANES) most = larger(most, load(score + k));
        float largest = NOTHING;
        for (int lane = 0; lane < LANES; lane++) largest = std::max(largest, float(most[lane]));
        for (int64_t k = 0; k < width; k += LANES) {
            const Vec weight = exponential(load(score + k) - largest);
            total += weight;
            store(score + k, weight);
        }
        found[h * (t.value_dim + 2)] = largest, found[h * (t.value_dim + 2) + 1] = sum(total);
    }
    float* sums = found + 2;
    int64_t d = 0;
    for (; d + LANES <= t.value_dim; d += LANES) {
        Vec total[HEADS] = {};
        for (int64_t k = 0; k < count; k++) {
            const Vec numbers = load(value + index[k] * t.of_value.token + d);
            for (int h = 0; h < HEADS; h++) total[h] += numbers * room.scores[h * width + k];
        }
        for (int h = 0; h < HEADS; h++) store(sums + h * (t.value_dim + 2) + d, total[h]);
    }
    for (; d < t.value_dim; d++)
        for (int h = 0; h < HEADS; h++) {
            float total = 0;
            for (int64_t k = 0; k < count; k++)
                total += number(value[index[k] * t.of_value.token + d]) * room.scores[h * width + k];
            sums[h * (t.value_dim + 2) + d] = total;
        }
}

template <class T>
void attend_span(const Task& t, int64_t sequence, int64_t kv_head, int64_t begin, Room& room, float* found) {
    const int64_t end = std::min(t.keys, begin + SPAN), group = t.heads / t.kv_heads;
    int32_t* index = (room.keys.index.resize(SPAN + 1), room.keys.index.data());
    const int64_t count = find_keys(t, at<uint8_t>(t.groups, t.of_groups, sequence, kv_head, 0),
                                    at<uint8_t>(t.reads, t.of_reads, sequence, kv_head, 0), begin, end, index);
    for (int64_t head = 0; head < group;) {
        const int64_t some = std::min<int64_t>(4, group - head), first = kv_head * group + head;
        float* of_head = found + head * (t.value_dim + 2);
        if (some == 1) attend_keys<T, 1>(t, sequence, kv_head, first, index, count, room, of_head);
        if (some == 2) attend_keys<T, 2>(t, sequence, kv_head, first, index, count, room, of_head);
        if (some == 3) attend_keys<T, 3>(t, sequence, kv_head, first, index, count, room, of_head);
        if (some == 4) attend_keys<T, 4>(t, sequence, kv_head, first, index, count, room, of_head);
        head += some;
    }
}

// What was found in the spans of one query head, together.
template <class T>
void put_together(const Task& t, int64_t sequence, int64_t head, int64_t spans, int64_t stride, const float* found) {
    T* output = (T*)at<T>(t.output, t.of_output, sequence, head, 0);
    float most = t.sink_logits ? t.sink_logits[head] : NOTHING;
    for (int64_t span = 0; span < spans; span++) most = std::max(most, found[span * stride]);
    float total = t.sink_logits ? std::exp(t.sink_logits[head] - most) : 0;
    for (int64_t span = 0; span < spans; span++)
        total += std::exp(found[span * stride] - most) * found[span * stride + 1];
    for (int64_t d = 0; d < t.value_dim; d++) {
        float sum = 0;
        for (int64_t span = 0; span < spans; span++)
            sum += std::exp(found[span * stride] - most) * found[span * stride + 2 + d];
        put(output + d, total > 0 ? sum / total : 0);
    }
}

template <class T>
void attend_one(const Task& t) {
    const int64_t spans = (t.keys + SPAN - 1) / SPAN, heads = t.batch * t.kv_heads, group = t.heads / t.kv_heads;
    const int64_t of_head = t.value_dim + 2, of_span = group * of_head;
    std::vector<float> found(heads * spans * of_span);
#pragma omp parallel num_threads(std::min(t.threads, heads * spans))
    {
        Room room;
#pragma omp for schedule(dynamic)
        for (int64_t item = heads * spans - 1; item >= 0; item--)
            attend_span<T>(t, item / spans / t.kv_heads, item / spans % t.kv_heads, item % spans * SPAN, room,
                           found.data() + item * of_span);
#pragma omp for
        for (int64_t head = 0; head < t.batch * t.heads; head++)
            put_together<T>(t, head / t.heads, head % t.heads, spans, of_span,
                            found.data() + head / group * spans * of_span + head % group * of_head);
    }
}

template <class T>
void attend(const Task& t) {
    t.queries == 1 ? attend_one<T>(t) : attend_blocks<T>(t);
}

extern "C" void focus_attend(const Task* task) { task->narrow ? attend<bfloat16>(*task) : attend<float>(*task); }
