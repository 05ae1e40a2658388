// Focus attention on a CPU: each query attends to the keys that it reads, where they lie; of a key it is told one byte,
// its group.
#include "prompt.h"
#include "token.h"

template <class T>
void attend(const Task& t) {
    t.queries == 1 ? attend_one<T>(t) : attend_blocks<T>(t);
}

extern "C" void focus_attend(const Task* task) { task->narrow ? attend<bfloat16>(*task) : attend<float>(*task); }
