// Items of work over threads: OpenMP's where the compiler has it, else the language's own.
#pragma once

#include <algorithm>
#include <cstdint>
#ifndef _OPENMP
#include <atomic>
#include <system_error>
#include <thread>
#include <vector>
#endif

// Work on each item, the last one first; every thread has a space of its own.
template <class Space, class Work>
void for_each(int64_t items, int64_t threads, Work work) {
    threads = std::max<int64_t>(1, std::min(threads, items));
#ifdef _OPENMP
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Space space;
#pragma omp for schedule(dynamic)
        for (int64_t item = items - 1; item >= 0; item--) work(item, space);
    }
#else
    std::atomic<int64_t> left{items};
    const auto some = [&] {
        Space space;
        for (int64_t item; (item = --left) >= 0;) work(item, space);
    };
    std::vector<std::thread> others;
    try {
        while (int64_t(others.size()) + 1 < threads) others.emplace_back(some);
    } catch (const std::system_error&) {  // no more to be had
    }
    some();
    for (std::thread& other : others) other.join();
#endif
}
