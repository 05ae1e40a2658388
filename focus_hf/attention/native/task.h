// What is asked of attention, and the keys that queries read.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "vectors.h"

constexpr int BLOCK = 16;                             // queries that share a list of keys
constexpr float NOTHING = -1e20f, HIDDEN = -1e30f;    // less than any score, and less than that

struct Strides {
    int64_t sequence, head, token;
};

// As `attend` in calls.py packs it.
struct Task {
    const void *query, *key, *value;
    const uint8_t *groups, *reads;
    const float* sink_logits;  // of each query head, or null
    const int64_t* edges;      // of each sequence its first key and the one behind its newest; null: it has all
    const int32_t* table;      // of each sequence the blocks that its keys are in; null: one, which has its own number
    void* output;
    Strides of_query, of_key, of_value, of_groups, of_reads, of_output;  // of keys: block, head, place
    int64_t batch, heads, choosers, of_key_head;  // of_key_head: choosers that read the same key head
    int64_t queries, keys, dim, value_dim, cells, bands;
    int64_t window, sinks, dense, threads, narrow;  // sinks, dense: counted from the first key; narrow: bfloat16
    int64_t block_size, table_row;
    double scale;

    int64_t first(int64_t sequence) const { return edges ? edges[2 * sequence] : 0; }
    int64_t stop(int64_t sequence) const { return edges ? edges[2 * sequence + 1] : keys; }
    int64_t block(int64_t sequence, int64_t number) const {
        return table ? table[sequence * table_row + number] : sequence;
    }

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

    // Of queries `first .. first + size - 1`, counted among the keys, of which the sequence's begin at `begin`.
    void find(const Task& task, const uint8_t* groups, const uint8_t* reads, int64_t first, int64_t size,
              int64_t begin) {
        index.resize(task.keys + 1), readers.resize(task.keys + 1), of_cell.assign(task.cells, 0);
        count = 0;
        for (int64_t query = 0; query < size; query++, reads += task.of_reads.token)
            for (int64_t cell = 0; cell < task.cells; cell++) of_cell[cell] |= uint16_t(reads[cell]) << query;
        const uint16_t dense = bits(0, begin + task.dense - 1 - first, size);
        if (dense)
            for (auto& who : of_cell) who |= dense;
        const int64_t last = first + size - 1;
        int64_t key = begin;
        for (; key < std::min(begin + task.sinks, last + 1); key++) add(key, bits(key - first, size, size));
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

struct Place {  // of a key that is read: how far it is from the first one of its head, and its value from the first
    int64_t key, value;
};

struct Room {  // of one thread
    Keys keys;
    std::vector<Place> places;
    std::vector<float> rows, scores, sums, wide;
};
