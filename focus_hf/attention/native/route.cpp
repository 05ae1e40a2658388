// Which cells queries read (`routing.cells.cell_reads`), on a CPU. A vector's lanes are queries.
#include <algorithm>
#include <cmath>
#include <vector>

#include "vectors.h"

// Mirrored by `_Route` in route.py. Tensors are contiguous but for the queries.
struct Route {
    const void* query;    // (batch, kv_heads * group, queries, dim), bfloat16 if narrow
    const float* first;   // (kv_heads, numbers, group * dim), numbers = dimensions + bands + 1
    const float* second;  // (kv_heads, numbers, cells + 1): a group's centroid stands above each of its cells
    const float* bias;    // (kv_heads, cells + 1)
    const float* offset;  // (kv_heads)
    const float* limits;  // (batch, queries, bands)
    uint8_t* reads;       // (batch, kv_heads, queries, cells)
    int64_t of_query[3], of_limits;  // in numbers; of_limits: from sequence to sequence
    int64_t batch, kv_heads, group, queries, dim, dimensions, cells, bands, threads, narrow;
};

struct Space {  // of one thread
    std::vector<float> rows, scores;
    std::vector<Vec> numbers;
};

template <class T>
void route_lanes(const Route& t, int64_t head, int64_t start, Space& space) {
    const int64_t lanes = std::min<int64_t>(LANES, t.batch * t.queries - start), width = t.group * t.dim;
    const int64_t numbers = t.dimensions + t.bands + 1, every = t.cells + 1;
    auto sequence = [&](int lane) { return (start + lane) / t.queries; };
    auto token = [&](int lane) { return (start + lane) % t.queries; };
    space.rows.assign(width * LANES, 0), space.numbers.resize(numbers), space.scores.resize(every * LANES);
    for (int lane = 0; lane < lanes; lane++)
        for (int64_t one = 0; one < t.group; one++) {
            const T* query = (const T*)t.query + sequence(lane) * t.of_query[0] +
                             (head * t.group + one) * t.of_query[1] + token(lane) * t.of_query[2];
            float* row = space.rows.data() + one * t.dim * LANES + lane;
            for (int64_t d = 0; d < t.dim; d++) row[d * LANES] = number(query[d]);
        }
    const float* first = t.first + head * numbers * width;
    for (int64_t n = 0; n < numbers; n++) {
        Vec even = {}, odd = {};
        int64_t d = 0;
        for (; d + 1 < width; d += 2) {
            even += first[n * width + d] * load(space.rows.data() + d * LANES);
            odd += first[n * width + d + 1] * load(space.rows.data() + (d + 1) * LANES);
        }
        if (d < width) even += first[n * width + d] * load(space.rows.data() + d * LANES);
        space.numbers[n] = even + odd;
    }
    const float *second = t.second + head * numbers * every, *bias = t.bias + head * every;
    const Vec* of_band = space.numbers.data() + t.dimensions;
    Vec most = of_band[t.bands] + bias[t.cells], near = most;
    for (int64_t cell = 0; cell < t.cells; cell += t.bands) {
        Vec product = {};
        for (int64_t n = 0; n < t.dimensions; n++) product += second[n * every + cell] * space.numbers[n];
        for (int64_t band = 0; band < t.bands; band++) {
            const Vec score = product + of_band[band] + bias[cell + band];
            most = larger(most, score);
            store(space.scores.data() + (cell + band) * LANES, score);
        }
    }
    Vec total = exponential(near - most);
    for (int64_t cell = 0; cell < t.cells; cell++)
        total += exponential(load(space.scores.data() + cell * LANES) - most);
    std::vector<Vec> limit(t.bands);
    for (int64_t band = 0; band < t.bands; band++)
        for (int lane = 0; lane < LANES; lane++) {
            const int64_t at = lane < lanes ? sequence(lane) * t.of_limits + token(lane) * t.bands + band : band;
            limit[band][lane] = most[lane] + std::log(total[lane]) + t.limits[at] + t.offset[head];
        }
    uint8_t* rows[LANES];
    for (int lane = 0; lane < lanes; lane++)
        rows[lane] = t.reads + ((sequence(lane) * t.kv_heads + head) * t.queries + token(lane)) * t.cells;
    for (int64_t cell = 0, band = 0; cell < t.cells; cell += 4) {  // four of a query's answers in one number
        Ints four = {};
        const int64_t some = std::min<int64_t>(4, t.cells - cell);
        for (int64_t one = 0; one < some; one++, band = band + 1 < t.bands ? band + 1 : 0)
            four |= (load(space.scores.data() + (cell + one) * LANES) > limit[band]) & (1 << 8 * one);
        for (int lane = 0; lane < lanes; lane++) {
            const int32_t answers = four[lane];
            memcpy(rows[lane] + cell, &answers, some);
        }
    }
}

extern "C" void focus_route(const Route* route) {
    const Route& t = *route;
    const int64_t blocks = (t.batch * t.queries + LANES - 1) / LANES;
#pragma omp parallel num_threads(std::min(t.threads, blocks * t.kv_heads))
    {
        Space space;
#pragma omp for schedule(static)
        for (int64_t item = 0; item < blocks * t.kv_heads; item++)
            (t.narrow ? route_lanes<bfloat16> : route_lanes<float>)(t, item / blocks, item % blocks * LANES, space);
    }
}
