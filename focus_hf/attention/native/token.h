// A single query: a vector's lanes are numbers of a token.
#pragma once

#include "parallel.h"
#include "task.h"

constexpr int64_t SPAN = 2048;           // keys that one piece of work looks at
constexpr int64_t AHEAD = 16, LINE = 64;  // keys that are asked for before they are wanted; bytes of a cache line

// Which of some keys the newest token of a sequence reads.
int64_t find_keys(const Task& t, int64_t sequence, int64_t chooser, int64_t begin, int64_t end, Room& room) {
    const uint8_t* reads = at<uint8_t>(t.reads, t.of_reads, sequence, chooser, 0);
    const int64_t first = t.first(sequence), query = t.stop(sequence) - 1, sinks = first + t.sinks;
    const int64_t near = first + t.dense > query ? 0 : query - t.window;
    int32_t* index = (room.keys.index.resize(SPAN + 1), room.keys.index.data());
    room.places.resize(SPAN);
    int64_t count = 0, key = std::max(begin, first);
    end = std::min(end, query + 1);
    while (key < end) {  // block after block; what is listed are places in the block
        const int64_t number = key / t.block_size, start = number * t.block_size, listed = count;
        const int64_t block = t.block(sequence, number), stop = std::min(end, start + t.block_size) - start;
        const uint8_t* groups = at<uint8_t>(t.groups, t.of_groups, block, chooser / t.of_key_head, 0);
        int64_t place = key - start;
        for (; place < std::min({stop, sinks - start, near - start}); place++) index[count++] = place;
        for (int64_t band = t.bands - 1; band >= 0; band--)
            for (; place < std::min({stop, near - start, query - t.begin(band) - start}); place++) {
                index[count] = place;
                count += reads[groups[place * t.of_groups.token] * t.bands + band] != 0;
            }
        for (; place < stop; place++) index[count++] = place;
        const int64_t of_key = block * t.of_key.sequence, of_value = block * t.of_value.sequence;
        for (int64_t k = listed; k < count; k++)
            room.places[k] = {of_key + index[k] * t.of_key.token, of_value + index[k] * t.of_value.token};
        key = start + stop;
    }
    return count;
}

// What HEADS query heads find among some keys: of each its largest score, the sum of weights, and the weighted values.
template <class T, int HEADS>
void attend_keys(const Task& t, int64_t sequence, int64_t chooser, int64_t start, int64_t count, Room& room,
                 float* found) {
    const T* key = at<T>(t.key, t.of_key, 0, chooser / t.of_key_head, 0);
    const T* value = at<T>(t.value, t.of_value, 0, chooser / t.of_key_head, 0);
    const Place* places = room.places.data();
    const int64_t whole = t.dim / LANES * LANES, width = (count + LANES - 1) / LANES * LANES;
    room.rows.resize(HEADS * t.dim), room.scores.resize(HEADS * width);
    for (int h = 0; h < HEADS; h++) {
        const T* query = at<T>(t.query, t.of_query, sequence, start + h, 0);
        for (int64_t d = 0; d < t.dim; d++) room.rows[h * t.dim + d] = number(query[d]) * float(t.scale);
    }
    for (int64_t k = 0; k < count; k++) {
        const T* one = key + places[k].key;
        if (k + AHEAD < count) {
            const T* later[] = {key + places[k + AHEAD].key, value + places[k + AHEAD].value};
            for (int64_t d = 0; d < t.dim; d += LINE / sizeof(T)) __builtin_prefetch(later[0] + d);
            for (int64_t d = 0; d < t.value_dim; d += LINE / sizeof(T)) __builtin_prefetch(later[1] + d, 0, 2);
        }
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
            const Vec numbers = load(value + places[k].value + d);
            for (int h = 0; h < HEADS; h++) total[h] += numbers * room.scores[h * width + k];
        }
        for (int h = 0; h < HEADS; h++) store(sums + h * (t.value_dim + 2) + d, total[h]);
    }
    for (; d < t.value_dim; d++)
        for (int h = 0; h < HEADS; h++) {
            float total = 0;
            for (int64_t k = 0; k < count; k++)
                total += number(value[places[k].value + d]) * room.scores[h * width + k];
            sums[h * (t.value_dim + 2) + d] = total;
        }
}

template <class T>
void attend_span(const Task& t, int64_t sequence, int64_t chooser, int64_t begin, Room& room, float* found) {
    const int64_t group = t.heads / t.choosers;
    const int64_t count = find_keys(t, sequence, chooser, begin, begin + SPAN, room);
    for (int64_t head = 0; head < group;) {
        const int64_t some = std::min<int64_t>(4, group - head), first = chooser * group + head;
        float* of_head = found + head * (t.value_dim + 2);
        if (some == 1) attend_keys<T, 1>(t, sequence, chooser, first, count, room, of_head);
        if (some == 2) attend_keys<T, 2>(t, sequence, chooser, first, count, room, of_head);
        if (some == 3) attend_keys<T, 3>(t, sequence, chooser, first, count, room, of_head);
        if (some == 4) attend_keys<T, 4>(t, sequence, chooser, first, count, room, of_head);
        head += some;
    }
}

// What was found in the spans of one query head, together.
template <class T>
void put_together(const Task& t, int64_t sequence, int64_t head, int64_t spans, int64_t stride, float* found) {
    T* output = (T*)at<T>(t.output, t.of_output, sequence, head, 0);
    float most = t.sink_logits ? t.sink_logits[head] : NOTHING;
    for (int64_t span = 0; span < spans; span++) most = std::max(most, found[span * stride]);
    float total = t.sink_logits ? std::exp(t.sink_logits[head] - most) : 0;
    for (int64_t span = 0; span < spans; span++) {
        found[span * stride] = std::exp(found[span * stride] - most);
        total += found[span * stride] * found[span * stride + 1];
    }
    for (int64_t d = 0; d < t.value_dim; d++) {
        float sum = 0;
        for (int64_t span = 0; span < spans; span++) sum += found[span * stride] * found[span * stride + 2 + d];
        put(output + d, total > 0 ? sum / total : 0);
    }
}

template <class T>
void attend_one(const Task& t) {
    const int64_t spans = (t.keys + SPAN - 1) / SPAN, heads = t.batch * t.choosers, group = t.heads / t.choosers;
    const int64_t of_head = t.value_dim + 2, of_span = group * of_head;
    std::vector<float> found(heads * spans * of_span);
    for_each<Room>(heads * spans, t.threads, [&](int64_t item, Room& room) {
        attend_span<T>(t, item / spans / t.choosers, item / spans % t.choosers, item % spans * SPAN, room,
                       found.data() + item * of_span);
    });
    for (int64_t head = 0; head < t.batch * t.heads; head++)
        put_together<T>(t, head / t.heads, head % t.heads, spans, of_span,
                        found.data() + head / group * spans * of_span + head % group * of_head);
}
