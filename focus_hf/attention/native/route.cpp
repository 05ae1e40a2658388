// Which cells queries read (`routing.cells.cell_reads`), on a CPU.
#include <algorithm>
#include <cmath>
#include <vector>

#include "parallel.h"
#include "vectors.h"

// As `cell_reads` in calls.py packs it. All but the queries is contiguous; numbers = dimensions + bands + 1.
struct Route {
    const float* first;      // (choosers, numbers, group * dim)
    const float* centroids;  // (choosers, dimensions, groups)
    const float* bias;       // (choosers, bands, groups)
    const float* near;       // (choosers)
    const float* offset;     // (choosers)
    const void* query;       // (batch, choosers * group, queries, dim), bfloat16 if narrow
    const float* limits;     // (batch, queries, bands)
    uint8_t* reads;          // (batch, choosers, queries, groups, bands)
    int64_t of_query[3], of_limits;  // of_limits: from sequence to sequence
    int64_t batch, choosers, group, queries, dim, dimensions, groups, bands, threads, narrow;

    int64_t width() const { return group * dim; }
    int64_t numbers() const { return dimensions + bands + 1; }

    template <class T>
    const T* query_of(int64_t row, int64_t head, int64_t one) const {
        return (const T*)query + row / queries * of_query[0] + (head * group + one) * of_query[1] +
               row % queries * of_query[2];
    }
    const float* limits_of(int64_t row) const { return limits + row / queries * of_limits + row % queries * bands; }
    uint8_t* reads_of(int64_t row, int64_t head) const {
        return reads + ((row / queries * choosers + head) * queries + row % queries) * groups * bands;
    }
};

struct Space {  // of one thread
    std::vector<float> rows, scores;
    std::vector<Vec> numbers, limit;
};

// Many queries: a vector's lanes are queries.
template <class T>
void route_many(const Route& t, int64_t head, int64_t start, Space& space) {
    const int64_t lanes = std::min<int64_t>(LANES, t.batch * t.queries - start), cells = t.groups * t.bands;
    space.rows.assign(t.width() * LANES, 0), space.numbers.resize(t.numbers());
    space.scores.resize(cells * LANES), space.limit.resize(t.bands);
    for (int lane = 0; lane < lanes; lane++)
        for (int64_t one = 0; one < t.group; one++) {
            const T* query = t.query_of<T>(start + lane, head, one);
            float* row = space.rows.data() + one * t.dim * LANES + lane;
            for (int64_t d = 0; d < t.dim; d++) row[d * LANES] = number(query[d]);
        }
    const float* first = t.first + head * t.numbers() * t.width();
    for (int64_t n = 0; n < t.numbers(); n++, first += t.width()) {
        Vec part[2] = {};
        for (int64_t d = 0; d < t.width(); d++) part[d & 1] += first[d] * load(space.rows.data() + d * LANES);
        space.numbers[n] = part[0] + part[1];
    }
    const float *centroids = t.centroids + head * t.dimensions * t.groups, *bias = t.bias + head * cells;
    const Vec *of_band = space.numbers.data() + t.dimensions, near = of_band[t.bands] + t.near[head];
    Vec most = near;
    float* score = space.scores.data();
    for (int64_t group = 0; group < t.groups; group++) {
        Vec product = {};
        for (int64_t n = 0; n < t.dimensions; n++) product += centroids[n * t.groups + group] * space.numbers[n];
        for (int64_t band = 0; band < t.bands; band++, score += LANES) {
            const Vec own = product + of_band[band] + bias[band * t.groups + group];
            most = larger(most, own);
            store(score, own);
        }
    }
    Vec total = exponential(near - most);
    for (int64_t cell = 0; cell < cells; cell++) total += exponential(load(space.scores.data() + cell * LANES) - most);
    for (int64_t band = 0; band < t.bands; band++)
        for (int lane = 0; lane < LANES; lane++)
            space.limit[band][lane] = most[lane] + std::log(total[lane]) + t.offset[head] +
                                      t.limits_of(start + std::min<int64_t>(lane, lanes - 1))[band];
    uint8_t* rows[LANES];
    for (int lane = 0; lane < lanes; lane++) rows[lane] = t.reads_of(start + lane, head);
    for (int64_t cell = 0, band = 0; cell < cells; cell += 4) {  // four of a query's answers in one number
        Ints four = {};
        const int64_t some = std::min<int64_t>(4, cells - cell);
        for (int64_t one = 0; one < some; one++, band = band + 1 < t.bands ? band + 1 : 0)
            four |= (load(space.scores.data() + (cell + one) * LANES) > space.limit[band]) & (1 << 8 * one);
        for (int lane = 0; lane < lanes; lane++) {
            const int32_t answers = four[lane];
            memcpy(rows[lane] + cell, &answers, some);
        }
    }
}

// One query: a vector's lanes are numbers of it, then groups.
template <class T>
void route_one(const Route& t, int64_t head, int64_t row, Space& space) {
    const int64_t padded = (t.groups + LANES - 1) / LANES * LANES, width = (t.width() + LANES - 1) / LANES * LANES;
    space.rows.assign(width, 0), space.scores.resize((t.bands + 1) * padded);
    std::vector<float> number_of(t.numbers());
    for (int64_t one = 0; one < t.group; one++)
        for (int64_t d = 0; d < t.dim; d++) space.rows[one * t.dim + d] = number(t.query_of<T>(row, head, one)[d]);
    const float* first = t.first + head * t.numbers() * t.width();
    for (int64_t n = 0; n < t.numbers(); n++, first += t.width()) {
        Vec part = {};
        int64_t d = 0;
        for (; d + LANES <= t.width(); d += LANES) part += load(first + d) * load(space.rows.data() + d);
        number_of[n] = sum(part);
        for (; d < t.width(); d++) number_of[n] += first[d] * space.rows[d];
    }
    const float *centroids = t.centroids + head * t.dimensions * t.groups, *bias = t.bias + head * t.groups * t.bands;
    float *products = space.scores.data() + t.bands * padded, most = number_of[t.dimensions + t.bands] + t.near[head];
    const float near = most, *of_band = number_of.data() + t.dimensions;
    for (int64_t group = 0; group < padded; group++) products[group] = 0;
    for (int64_t n = 0; n < t.dimensions; n++, centroids += t.groups)
        for (int64_t group = 0; group < t.groups; group++) products[group] += centroids[group] * number_of[n];
    for (int64_t band = 0; band < t.bands; band++) {
        float* score = space.scores.data() + band * padded;
        for (int64_t group = 0; group < padded; group++)
            score[group] = group < t.groups ? products[group] + of_band[band] + bias[band * t.groups + group] : -1e30f;
        Vec largest = splat(most);
        for (int64_t group = 0; group < padded; group += LANES) largest = larger(largest, load(score + group));
        for (int lane = 0; lane < LANES; lane++) most = std::max(most, float(largest[lane]));
    }
    Vec total = {};
    for (int64_t cell = 0; cell < t.bands * padded; cell += LANES)
        total += exponential(load(space.scores.data() + cell) - most);
    const float all = most + std::log(sum(total) + std::exp(near - most)) + t.offset[head];
    uint8_t* reads = t.reads_of(row, head);
    for (int64_t band = 0; band < t.bands; band++) {
        const float limit = all + t.limits_of(row)[band], *score = space.scores.data() + band * padded;
        for (int64_t group = 0; group < t.groups; group++) reads[group * t.bands + band] = score[group] > limit;
    }
}

template <class T>
void route(const Route& t) {
    const int64_t rows = t.batch * t.queries, step = rows < LANES ? 1 : LANES, blocks = (rows + step - 1) / step;
    for_each<Space>(blocks * t.choosers, step == 1 ? 1 : t.threads, [&](int64_t item, Space& space) {
        (step == 1 ? route_one<T> : route_many<T>)(t, item / blocks, item % blocks * step, space);
    });
}

extern "C" void focus_route(const Route* task) { task->narrow ? route<bfloat16>(*task) : route<float>(*task); }
