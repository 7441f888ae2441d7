// Few rows through a stack of layers: every weight is read once, as fast as memory gives it, and nothing else takes time.
//
// In:  a Stack (sizes and pointers, filled by ../few_rows.py, which mirrors the structs below; all weights but the
//      embedding are packed), tokens or states of some rows, where they stand, the caches of keys and values, and what
//      recurrent layers remember.
// Out: states of the rows after the last norm; the rows' keys, values and inputs of recurrent layers in their slots.
//
// Float is the type of weights, states and caches: float, or bfloat16. A build (-DNUMBER=...) has one of them. Sums, norms,
// softmax and the residual stream are in float32 in both. A bfloat16 model is rounded where a product reads a value or a
// cache keeps it, and at the end. The sum of a product has the same order for any number of rows, so a row's result does
// not depend on the rows beside it.
//
// A parallel region spans a whole step: its drafts and their verification. Between two barriers every thread writes its
// own outputs of a product.

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <thread>
#include <type_traits>
#include <vector>

#ifdef __FMA__
#include <immintrin.h>
#endif
#ifdef __AVX512F__
constexpr int LANES = 16, MOST_ROWS = 4, WIDE = 8, NARROW = 4, STRIPS = 6;
#else
constexpr int LANES = 8, MOST_ROWS = 2, WIDE = 4, NARROW = 4, STRIPS = 4;
#endif
// Of a block of a product: LANES numbers in a vector, at most MOST_ROWS rows. With a packed weight STRIPS strips of LANES
// outputs, 8 for one row; with cached keys WIDE slots for up to two rows, else NARROW.

typedef float Vector __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t Signed __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));

struct bfloat16 {
    uint16_t bits;
};

inline Vector load(const float* from) { return *reinterpret_cast<const Vector*>(from); }

inline Vector load(const bfloat16* from) {
    return (Vector)(__builtin_convertvector(*reinterpret_cast<const Halves*>(from), Words) << 16);
}

inline void store(float* to, Vector value) { *reinterpret_cast<Vector*>(to) = value; }

inline void store(bfloat16* to, Vector value) {  // to nearest, ties to even
    Words bits = (Words)value;
    *reinterpret_cast<Halves*>(to) = __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, Halves);
}

inline float to_float(float value) { return value; }

inline float to_float(bfloat16 value) {
    uint32_t bits = uint32_t(value.bits) << 16;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

inline void put(float* to, float value) { *to = value; }

inline void put(bfloat16* to, float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    to->bits = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// The sums of four vectors; halves are added until a lane each is left, and four vectors share every addition.
inline void totals(const Vector* value, float* sum) {
#ifdef __AVX512F__
    auto first = [](Vector a, Vector b) {
        return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
    };
    auto second = [](Vector a, Vector b) {
        return __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    };
    Vector ab = first(value[0], value[1]) + second(value[0], value[1]);
    Vector cd = first(value[2], value[3]) + second(value[2], value[3]);
    Vector abcd = __builtin_shufflevector(ab, cd, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
                  __builtin_shufflevector(ab, cd, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    abcd += __builtin_shufflevector(abcd, abcd, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    abcd += __builtin_shufflevector(abcd, abcd, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    *reinterpret_cast<Four*>(sum) = __builtin_shufflevector(abcd, abcd, 0, 4, 8, 12);
#else
    Vector ab = __builtin_shufflevector(value[0], value[1], 0, 1, 2, 3, 8, 9, 10, 11) +
                __builtin_shufflevector(value[0], value[1], 4, 5, 6, 7, 12, 13, 14, 15);
    Vector cd = __builtin_shufflevector(value[2], value[3], 0, 1, 2, 3, 8, 9, 10, 11) +
                __builtin_shufflevector(value[2], value[3], 4, 5, 6, 7, 12, 13, 14, 15);
    Vector abcd = __builtin_shufflevector(ab, cd, 0, 1, 4, 5, 8, 9, 12, 13) +
                  __builtin_shufflevector(ab, cd, 2, 3, 6, 7, 10, 11, 14, 15);
    abcd += __builtin_shufflevector(abcd, abcd, 1, 0, 3, 2, 5, 4, 7, 6);
    *reinterpret_cast<Four*>(sum) = __builtin_shufflevector(abcd, abcd, 0, 2, 4, 6);
#endif
}

inline float total(Vector value) {
    Vector four[4] = {value};
    float sum[4];
    totals(four, sum);
    return sum[0];
}

inline Vector all(float value) { return Vector{} + value; }

// sum + a * b, rounded once where the CPU can. The compiler is forbidden to fuse others (-ffp-contract=off): it would do
// so in one copy of a loop and not in the next, and a row would depend on the number of rows.
inline Vector fused(Vector sum, Vector a, Vector b) {
#if defined(__AVX512F__)
    return (Vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__FMA__)
    return (Vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
    return sum + a * b;
#endif
}

inline Vector larger(Vector a, Vector b) { return a > b ? a : b; }

inline float largest(Vector value) {
    float lane[LANES];
    store(lane, value);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lane[i] = lane[i] > lane[i + half] ? lane[i] : lane[i + half];
    return lane[0];
}

// e^x within 2 units of the last place: 2^n e^r with |r| <= ln 2 / 2, and e^r by its series.
inline Vector exponential(Vector x) {
    x = larger(x, all(-87.0f));
    x = x < 88.0f ? x : all(88.0f);
    const Vector magic = all(12582912.0f);  // adding 1.5 * 2^23 rounds to a whole number
    Vector n = fused(magic, x, all(1.44269504f)) - magic;
    Vector r = fused(fused(x, n, all(-0.693145752f)), n, all(-1.42860677e-6f));
    Vector e = all(1.0f / 5040);
    for (float factor : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) e = fused(all(factor), e, r);
    return (Vector)((Signed)e + (__builtin_convertvector(n, Signed) << 23));
}

// ---- products with packed weights

// A line of a cache: two threads that write into one wait for each other.
struct alignas(64) Line {
    char bytes[64];
};

// How long threads have waited at barriers for one that did not come; ../threads.py reads it.
extern "C" {
std::atomic<int64_t> stalled_nanoseconds{0};
}

// A barrier of the threads of a region, in rounds: in each a thread signals the one `distance` behind it, and waits for the
// one before it. OpenMP's own takes twice as long, and a layer of a small model waits six times. After so many turns
// a thread lets others run, as the one that it waits for may have no core, and counts how long it waits from then on.
class Barrier {
  public:
    explicit Barrier(long most) : flags(most * ROUNDS), passed(most) {}

    void wait(long thread, long threads) {
        const long now = ++passed[thread].count;
        for (long round = 0, distance = 1; distance < threads; round++, distance *= 2) {
            flags[(thread + distance) % threads * ROUNDS + round].count.store(now, std::memory_order_release);
            const auto& own = flags[thread * ROUNDS + round].count;
            long turn = 0;
            for (; turn < TURNS && own.load(std::memory_order_acquire) < now; turn++) pause();
            if (turn == TURNS) stall(own, now);
        }
    }

  private:
    static constexpr long ROUNDS = 16, TURNS = 4096;
    struct alignas(64) Flag {
        std::atomic<long> count{0};
    };
    struct alignas(64) Passed {
        long count = 0;
    };
    std::vector<Flag> flags;
    std::vector<Passed> passed;

    static void stall(const std::atomic<long>& own, long now) {
        const auto began = std::chrono::steady_clock::now();
        while (own.load(std::memory_order_acquire) < now) std::this_thread::yield();
        const auto took = std::chrono::steady_clock::now() - began;
        stalled_nanoseconds += std::chrono::duration_cast<std::chrono::nanoseconds>(took).count();
    }

    static void pause() {
#ifdef __x86_64__
        __builtin_ia32_pause();
#endif
    }
};

struct Share {  // of a thread: from `first` to `last` of `count` things
    long first, last;
    Share(long count, long thread, long threads, long unit = 1) {
        long units = (count + unit - 1) / unit;
        first = units * thread / threads * unit;
        last = units * (thread + 1) / threads * unit;
        if (last > count) last = count;
        if (first > count) first = count;
    }
    Share part(long from, long most) const {  // of this share, at most so many from one on
        Share made = *this;
        made.first = from;
        made.last = std::min(from + most, last);
        return made;
    }
};

// A weight [outputs, inputs] is packed in strips of LANES outputs. A strip has a vector for every `PAIR` inputs: LANES
// times PAIR of its entries. So a sum of a row is a lane, and needs no addition across lanes: of a model in cache, three
// rows take as long as one. Outputs and inputs that fill the last strip and the last vector are zero.
template <class Float>
struct Packed {
    typedef Vector Read;
    static constexpr int PAIR = 1;
    static Read read(const Float* from) { return load(from); }
    static Read spread(const Float* x, long) { return all(to_float(*x)); }
    static Vector add(Vector sum, Read weight, Read x) { return fused(sum, weight, x); }
};

#ifdef __AVX512BF16__
template <>
struct Packed<bfloat16> {
    typedef __m512bh Read;
    static constexpr int PAIR = 2;
    static Read read(const bfloat16* from) { return (__m512bh)_mm512_loadu_si512(from); }
    static Read spread(const bfloat16* x, long left) {
        int pair = x->bits;
        if (left > 1) memcpy(&pair, x, sizeof pair);
        return (__m512bh)_mm512_set1_epi32(pair);
    }
    static Vector add(Vector sum, Read weight, Read x) { return (Vector)_mm512_dpbf16_ps((__m512)sum, weight, x); }
};
#endif

// Keeps a value in a register. g++ would read it from memory for each multiplication, and a core reads one vector a cycle.
template <class Value>
inline void hold(Value& value) {
#ifdef __AVX__
    asm("" : "+v"(value));
#endif
}

template <class Float>
long strip_size(long inputs) {
    constexpr int PAIR = Packed<Float>::PAIR;
    return (inputs + PAIR - 1) / PAIR * PAIR * LANES;
}

inline long strips_of(long outputs) { return (outputs + LANES - 1) / LANES; }

template <class Float>
void pack(const Float* weight, long outputs, long inputs, Float* to, long threads) {
    constexpr int PAIR = Packed<Float>::PAIR;
    const long size = strip_size<Float>(inputs);
#pragma omp parallel for num_threads(threads)
    for (long strip = 0; strip < strips_of(outputs); strip++)
        for (long in = 0; in < size / LANES; in += PAIR)
            for (long lane = 0; lane < LANES; lane++)
                for (long next = 0; next < PAIR; next++) {
                    const long out = strip * LANES + lane;
                    const bool is_filled = out < outputs && in + next < inputs;
                    to[strip * size + in * LANES + lane * PAIR + next] =
                        is_filled ? weight[out * inputs + in + next] : Float{};
                }
}

// ROWS rows of x times COUNT strips; `write(row, strip, LANES values)`.
template <int ROWS, int COUNT, class Float, class Write>
inline void packed_block(const Float* strips, const Float* x, long inputs, Write write) {
    typedef Packed<Float> P;
    const long size = strip_size<Float>(inputs);
    Vector sum[ROWS][COUNT] = {};
    for (long at = 0; at < inputs; at += P::PAIR) {
        typename P::Read a[ROWS];
        for (int row = 0; row < ROWS; row++) hold(a[row] = P::spread(x + row * inputs + at, inputs - at));
        for (int strip = 0; strip < COUNT; strip++) {
            auto b = P::read(strips + strip * size + at * LANES);
            if (ROWS > 1) hold(b);
            for (int row = 0; row < ROWS; row++) sum[row][strip] = P::add(sum[row][strip], b, a[row]);
        }
    }
    for (int row = 0; row < ROWS; row++)
        for (int strip = 0; strip < COUNT; strip++) {
            float values[LANES];
            store(values, sum[row][strip]);
            write(row, strip, values);
        }
}

// Blocks of rows: `some(number of rows, the first of them)`, MOST_ROWS at most.
template <class Some>
inline void by_rows(long rows, Some some) {
    for (long row = 0; row < rows;) {
        auto next = [&](auto count) {
            some(count, row);
            row += decltype(count)::value;
        };
        switch (rows - row) {
            case 1: next(std::integral_constant<int, 1>()); break;
#if defined(__AVX512F__)
            case 2: next(std::integral_constant<int, 2>()); break;
            case 3: next(std::integral_constant<int, 3>()); break;
#endif
            default: next(std::integral_constant<int, MOST_ROWS>());
        }
    }
}

// x [rows, inputs] times a thread's outputs of a packed weight; `write(row, output, values, count)` for LANES at most.
template <class Float, class Write>
void product(const Float* packed, const Float* x, long rows, long inputs, Share mine, Write write) {
    auto some = [&](auto count, long strip) {
        by_rows(rows, [&](auto some_rows, long row) {
            auto from_block = [&](int r, int s, const float* values) {
                const long out = (strip + s) * LANES;
                write(row + r, out, values, (int)std::min<long>(LANES, mine.last - out));
            };
            packed_block<decltype(some_rows)::value, decltype(count)::value>(
                packed + strip * strip_size<Float>(inputs), x + row * inputs, inputs, from_block);
        });
    };
    long strip = mine.first / LANES;
    const long last = strips_of(mine.last);
    if (rows == 1)
        for (; strip + 8 <= last; strip += 8) some(std::integral_constant<int, 8>(), strip);
    for (; strip + STRIPS <= last; strip += STRIPS) some(std::integral_constant<int, STRIPS>(), strip);
    for (; strip + 3 <= last; strip += 3) some(std::integral_constant<int, 3>(), strip);
    for (; strip < last; strip++) some(std::integral_constant<int, 1>(), strip);
}

// ---- products with keys, as they lie in the cache

template <class Float>
struct Step {  // what a product reads at once
    typedef Vector Read;
    static constexpr int COUNT = LANES;
    static Read read(const Float* from) { return load(from); }
    static Vector add(Vector sum, Read a, Read b) { return fused(sum, a, b); }
};

#ifdef __AVX512BF16__
template <>
struct Step<bfloat16> {
    typedef __m512bh Read;
    static constexpr int COUNT = 32;
    static Read read(const bfloat16* from) { return (__m512bh)_mm512_loadu_si512(from); }
    static Vector add(Vector sum, Read a, Read b) { return (Vector)_mm512_dpbf16_ps((__m512)sum, a, b); }
};
#endif

template <class Float>
typename Step<Float>::Read read_part(const Float* from, long count) {
    Float whole[Step<Float>::COUNT] = {};
    memcpy(whole, from, count * sizeof(Float));
    return Step<Float>::read(whole);
}

template <class Float>
Vector load_part(const Float* from, long count) {
    Float whole[LANES] = {};
    memcpy(whole, from, count * sizeof(Float));
    return load(whole);
}

// ROWS rows of x times OUTS rows of the weight; `write(row, output, values, count)` for up to four outputs at once.
template <int ROWS, int OUTS, class Float, class Write>
inline void block(const Float* weight, const Float* x, long inputs, Write write) {
    typedef Step<Float> S;
    Vector sum[ROWS][(OUTS + 3) / 4 * 4] = {};
    auto step = [&](auto read, long at) {
        typename S::Read a[ROWS];
        for (int row = 0; row < ROWS; row++) hold(a[row] = read(x + row * inputs + at));
        for (int out = 0; out < OUTS; out++) {
            auto b = read(weight + out * inputs + at);
            if (ROWS > 2) hold(b);
            __builtin_prefetch(weight + (OUTS + out) * inputs + at);  // of the next block
            for (int row = 0; row < ROWS; row++) sum[row][out] = S::add(sum[row][out], a[row], b);
        }
    };
    long at = 0;
    for (; at + S::COUNT <= inputs; at += S::COUNT) step(S::read, at);
    if (long rest = inputs - at) step([rest](const Float* from) { return read_part(from, rest); }, at);
    for (int row = 0; row < ROWS; row++)
        for (int out = 0; out < OUTS; out += 4) {
            float four[4];
            totals(sum[row] + out, four);
            write(row, out, four, std::min(OUTS - out, 4));
        }
}

// x [rows, inputs] times the first `count` keys [.., inputs].
template <class Float, class Write>
void key_product(const Float* keys, const Float* x, long rows, long inputs, long count, Write write) {
    auto some = [&](auto outs, long out) {
        by_rows(rows, [&](auto some_rows, long row) {
            auto from_block = [&](int r, int o, const float* four, int n) { write(row + r, out + o, four, n); };
            block<decltype(some_rows)::value, decltype(outs)::value>(keys + out * inputs, x + row * inputs, inputs,
                                                                     from_block);
        });
    };
    long out = 0;
    if (rows <= 2)
        for (; out + WIDE <= count; out += WIDE) some(std::integral_constant<int, WIDE>(), out);
    for (; out + NARROW <= count; out += NARROW) some(std::integral_constant<int, NARROW>(), out);
    for (; out < count; out++) some(std::integral_constant<int, 1>(), out);
}

// `count` values to where they belong.
template <class Float>
inline void keep(Float* to, const float* value, int count) {
    for (int i = 0; i < count; i++) put(to + i, value[i]);
}

// ---- the structs that Python fills

struct Norm {
    const float* weight;  // null: no norm
    float eps;
};

// Mamba-2 or Gated DeltaNet. A row's projection is the gate, what is convolved (x, keys, queries of Mamba-2; queries, keys,
// values of the delta rule, before the gate), and the steps of every head (of the delta rule beta, then alpha).
struct Recurrent {
    const void *in, *out;             // projections
    const float *convolution, *bias;  // [width, convolved], [convolved]; no bias: null
    const float *decay, *step_bias;   // [heads]: exp(A_log), dt_bias
    const float* skip;                // [heads], D of Mamba-2; null: the delta rule
    Norm norm;                        // of `normed` channels together; null: none
    int64_t heads, groups, key, value, width, normed;
    int64_t unit_keys;  // queries and keys are divided by their length

    bool is_delta() const { return !skip; }
    long inner() const { return heads * value; }
    long shared() const { return groups * key; }
    long convolved() const { return inner() + 2 * shared(); }
    long columns() const { return inner() + convolved() + (is_delta() ? 2 : 1) * heads; }
    long mixed_at() const { return is_delta() ? 0 : inner(); }
    long gate_at() const { return is_delta() ? convolved() : 0; }
    long steps_at() const { return inner() + convolved(); }
    long value_at() const { return is_delta() ? 2 * shared() : 0; }
    long key_at() const { return is_delta() ? shared() : inner(); }
    long query_at() const { return is_delta() ? 0 : inner() + shared(); }
};

struct Layer {  // of the parts that are not null
    const void *qkv, *proj, *gate, *up, *down;
    Norm mixing, mlp, query, key;  // `mixing` is before attention or the recurrence
    float scale;
    const Recurrent* recurrent;
};

struct Remembered {  // of a recurrent layer, as ../recurrent_layers.py has it
    float* state;   // [entries, heads, key, value]
    float* keys;    // [entries, groups, kept + 1, key]
    float* values;  // [entries, heads, kept + 1, value]
    float* sums;    // [entries, heads, kept + 1]
    void* mixed;    // [entries, kept + width, convolved]
};

struct Stack {
    int64_t layers, hidden, heads, groups, channels, turned, ffn;
    const Layer* layer;
    const float* turns;     // [positions, 2, turned]: cosines and signed sines; null without rotary embedding
    const void* embedding;  // [vocabulary, hidden]
    const void* merge;      // [hidden, 2 hidden] of a depth; null for the trunk
    Norm embedded, given;   // before `merge`
    Norm last;
};

struct Rows {
    int64_t rows, batch, window;
    const int64_t* tokens;  // [batch, rows]; row b starts at b * token_stride
    int64_t token_stride;
    const int64_t* first;               // [batch], where a chain of consecutive rows begins; before 0 it is padding
    const int64_t *positions, *places;  // [batch, rows] of other rows, with
    const float* mask;                  // [batch, 1, rows, window]; both null for a chain
    const void* given;                  // [rows, batch, hidden] that a depth continues; null for the trunk
    void* states;                       // [rows, batch, hidden], the result
    const void* continued;              // [blocks, size, hidden]: a depth continues those in its rows' slots; or null
    void* kept_states;                  // [blocks, size, hidden]: the result in the rows' slots too; or null
    void *const *keys, *const *values;  // of every layer, [blocks, groups, size, channels]
    const int64_t* table;               // [batch, pages]: the block of a text's first `size` slots, of the next ones, ...
    int64_t pages, size;                // the last page ends with the scratch slot
    const Remembered* remembered;       // of every layer; null where none is recurrent
    const int64_t* entry;               // [batch], where a text's are in these
    const int64_t* start;               // [entries], the position of the first slot that recurrent layers keep
    int64_t* end;                       // [entries], the position after the last row that has run
    int64_t kept;                       // these slots
    // Of rows that follow the tokens of every text: `tokens` are all of these, and `first` says how many they are.
    int64_t by_place, offset, ahead;  // row i stands at first + offset + i, and reads the token `ahead` places behind it
    const int64_t* drafted;           // [batch, ..], the tokens behind those, `draft_stride` apart
    int64_t draft_stride;
};

struct Pass {
    const Stack* stack;
    const Rows* memory;           // caches, and what recurrent layers remember
    int64_t rows, offset, ahead;  // as in Rows
    int64_t continues;            // a depth: 1 the trunk's states of these rows, 0 the last states of the pass before
};

struct GreedyStep {
    int64_t batch, window;
    int64_t* tokens;  // of every text, `token_stride` apart
    int64_t token_stride;
    int64_t* length;   // [batch], how many these are
    int64_t* drafted;  // [batch, ..], `draft_stride` apart
    int64_t draft_stride;
    const Pass* passes;  // of depths: each drafts a token
    int64_t count;
    const Pass* trunk;   // judges the drafts; null: they are not judged
    const void* states;  // [blocks, size, hidden], the trunk's
    const void* head;    // [vocabulary, hidden], packed
    int64_t vocabulary;
    int64_t* best;     // [batch, rows of the trunk], the most probable token after each
    int64_t* gained;   // [batch], by how many of these a text grows
    double* drafting;  // seconds
};

constexpr float VISIBLE = -1e30f;  // a smaller mask forbids

// ---- the parts of a forward

template <class In, class Out>
void normalize(const In* x, Norm norm, long channels, Out* to) {
    Vector squares = {};
    long at = 0;
    for (; at + LANES <= channels; at += LANES) squares = fused(squares, load(x + at), load(x + at));
    float sum = total(squares);
    for (long rest = at; rest < channels; rest++) sum += to_float(x[rest]) * to_float(x[rest]);
    float factor = 1 / std::sqrt(sum / channels + norm.eps);
    for (at = 0; at + LANES <= channels; at += LANES) store(to + at, load(x + at) * factor * load(norm.weight + at));
    for (; at < channels; at++) put(to + at, to_float(x[at]) * factor * norm.weight[at]);
}

// Softmax of the first `count` scores, in place, and 0 for those up to `seen`.
inline void softmax(float* score, const float* mask, float scale, long count, long seen) {
    for (long w = 0; w < count; w++) score[w] *= scale;
    if (mask)
        for (long w = 0; w < count; w++) score[w] += mask[w];
    for (long w = count; w < seen + LANES; w++) score[w] = -INFINITY;  // scores have room for whole vectors
    Vector mosts = all(-INFINITY), sums = {};
    for (long w = 0; w < count; w += LANES) mosts = larger(load(score + w), mosts);
    const float most = largest(mosts);
    for (long w = 0; w < seen; w += LANES) {
        Vector e = exponential(load(score + w) - most);
        e = load(score + w) > VISIBLE ? e : Vector{};
        store(score + w, e);
        sums += e;
    }
    float sum = total(sums), factor = sum > 0 ? 1 / sum : 0;
    for (long w = 0; w < seen; w++) score[w] *= factor;
}

// weights [count] of ROWS rows, `stride` apart, times PARTS vectors of values, [size, channels] from `block(slot)` on for
// every `size` slots. An addition waits for the one before, so TURNS sums take turns; `size` is a multiple of these where
// there are several blocks, so a sum does not depend on how slots are divided.
template <int ROWS, int PARTS, int TURNS, class Block, class Load>
inline void mix_some(const float* weight, long stride, Block block, long size, long count, long channels,
                     Vector (*sum)[PARTS], Load load_one) {
    Vector turns[ROWS][TURNS][PARTS] = {};
    for (long from = 0; from < count; from += size) {
        auto value = block(from);
        long w = 0, some = std::min(size, count - from);
        auto add = [&](int turn, long w) {
            for (int part = 0; part < PARTS; part++) {
                Vector one = load_one(value + w * channels + part * LANES);
                for (int row = 0; row < ROWS; row++)
                    turns[row][turn][part] = fused(turns[row][turn][part], all(weight[row * stride + from + w]), one);
            }
        };
        for (; w + TURNS <= some; w += TURNS)
            for (int turn = 0; turn < TURNS; turn++) add(turn, w + turn);
        for (int turn = 0; w + turn < some; turn++) add(turn, w + turn);
    }
    for (int row = 0; row < ROWS; row++)
        for (int part = 0; part < PARTS; part++) {
            sum[row][part] = turns[row][0][part];
            for (int turn = 1; turn < TURNS; turn++) sum[row][part] += turns[row][turn][part];
        }
}

// The outputs of ROWS rows, `out_stride` apart.
template <int ROWS, class Float, class Block>
void mix_rows(const float* weight, long stride, Block block, long size, long count, long channels, Float* out,
              long out_stride) {
    auto whole = [](const Float* from) { return load(from); };
    long c = 0;
    auto from_channel = [&](long slot) { return block(slot) + c; };
    auto some = [&](auto parts) {
        constexpr int PARTS = decltype(parts)::value;
        Vector sum[ROWS][PARTS];
        for (; c + PARTS * LANES <= channels; c += PARTS * LANES) {
            mix_some<ROWS, PARTS, 4 / PARTS>(weight, stride, from_channel, size, count, channels, sum, whole);
            for (int row = 0; row < ROWS; row++)
                for (int part = 0; part < PARTS; part++) store(out + row * out_stride + c + part * LANES, sum[row][part]);
        }
    };
    some(std::integral_constant<int, 4>());
    some(std::integral_constant<int, 2>());
    some(std::integral_constant<int, 1>());
    if (long rest = channels - c) {
        Vector sum[ROWS][1];
        auto part = [&](const Float* from) { return load_part(from, rest); };
        mix_some<ROWS, 1, 4>(weight, stride, from_channel, size, count, channels, sum, part);
        for (int row = 0; row < ROWS; row++)
            for (long lane = 0; lane < rest; lane++) put(out + row * out_stride + c + lane, sum[row][0][lane]);
    }
}

template <class Float, class Block>
void mix(const float* weight, Block block, long size, long count, long channels, Float* out) {
    mix_rows<1>(weight, 0, block, size, count, channels, out, 0);
}

struct Memory {  // that a forward works in; grows, and stays for the next one
    std::vector<Line> lines;
    size_t used = 0;
    template <class Type>
    Type* take(size_t count) {
        size_t begin = used;
        used += (count * sizeof(Type) + sizeof(Line) - 1) / sizeof(Line);
        return reinterpret_cast<Type*>(lines.data() + begin);
    }
};

template <class Float>
class Forward {
  public:
    Forward(const Stack& stack, const Rows& rows, long threads, Barrier& barrier)
        : s(stack), r(rows), barrier(barrier), all(rows.rows * rows.batch) {
        mixed = (s.heads + 2 * s.groups) * s.channels;
        attended = s.heads * s.channels;
        widest = std::max({2 * s.hidden, s.ffn, attended});
        scores = r.window + LANES;
        for (long layer = 0; layer < s.layers; layer++)
            if (const Recurrent* one = s.layer[layer].recurrent) most.cover(*one, r.kept);
        widest = std::max(widest, most.inner);
        static thread_local Memory memory;
        for (int pass = 0; pass < 2; pass++) {  // the first finds how much is needed
            memory.used = 0;
            residual = memory.take<float>(all * s.hidden);
            qkv = memory.take<float>(all * mixed);
            query = memory.take<Float>(all * attended);
            shared = memory.take<Float>(all * widest);
            own = memory.take<Float>(threads * all * widest);
            score = memory.take<float>(threads * r.rows * scores);
            slot = memory.take<long>(all);
            projected = memory.take<float>(all * most.columns);
            convolved = memory.take<float>(all * most.convolved);
            made = memory.take<float>(all * most.inner);
            asked = memory.take<float>(2 * all * most.shared);
            overlap = memory.take<float>(2 * all * most.overlaps);
            scratch = memory.take<float>(threads * most.scratch);
            halves = memory.take<float>(threads * all * 2 * 2 * STRIPS * LANES);
            if (memory.lines.size() < memory.used) memory.lines.resize(memory.used);
        }
        if (r.remembered)
            for (long text = 0; text < r.batch; text++) count_rows(text);
    }

    void run(long thread, long threads) {
        Float* x = own + thread * all * widest;
        start(x, thread, threads);
        for (long layer = 0; layer < s.layers; layer++) {
            if (s.layer[layer].recurrent) recurrent(layer, x, thread, threads);
            if (s.layer[layer].qkv) attention(layer, x, thread, threads);
            if (s.layer[layer].gate) mlp(s.layer[layer], x, thread, threads);
        }
        Share mine(all, thread, threads);
        for (long row = mine.first; row < mine.last; row++) {
            Float* to = (Float*)r.states + row * s.hidden;
            if (s.last.weight) normalize(residual + row * s.hidden, s.last, s.hidden, to);
            else for (long h = 0; h < s.hidden; h++) put(to + h, residual[row * s.hidden + h]);
            if (r.kept_states) memcpy((Float*)r.kept_states + in_states(row), to, s.hidden * sizeof(Float));
        }
    }

  private:
    const Stack& s;
    const Rows r;
    Barrier& barrier;
    long all, mixed, attended, widest, scores;
    float *residual, *qkv, *score, *halves;
    Float *query, *shared, *own;

    struct {  // of the recurrent layers, the most that any needs for a row, or a thread
        long columns = 0, convolved = 0, inner = 0, shared = 0, overlaps = 0, scratch = 0;
        void cover(const Recurrent& one, long kept) {
            columns = std::max(columns, one.columns());
            convolved = std::max(convolved, one.convolved());
            inner = std::max(inner, one.inner());
            shared = std::max(shared, one.shared());
            overlaps = std::max<long>(overlaps, one.groups * kept);
            scratch = std::max<long>(scratch, std::max<long>(kept, one.key) + one.value + 2 * LANES);
        }
    } most;
    long* slot;  // of every row, where recurrent layers keep it; -1 for padding
    float *projected, *convolved, *made, *asked, *overlap, *scratch;

    long text_of(long row) const { return row % r.batch; }
    long place_of(long row) const { return text_of(row) * r.rows + row / r.batch; }
    long in_chain(long row) const { return r.first[text_of(row)] + r.offset + row / r.batch; }
    int64_t token_of(long row) const {
        const int64_t* tokens = r.tokens + text_of(row) * r.token_stride;
        if (!r.by_place) return tokens[row / r.batch];
        long place = in_chain(row) + r.ahead, behind = place - r.first[text_of(row)];
        return behind < 0 ? tokens[std::max(place, 0L)] : r.drafted[text_of(row) * r.draft_stride + behind];
    }
    long position_of(long row) const {
        return r.first ? std::max(in_chain(row), 0L) : r.positions[place_of(row)];
    }
    long slot_of(long row) const {
        if (!r.first) return r.places[place_of(row)];
        return in_chain(row) < 0 ? scratch_slot() : in_chain(row);
    }
    long scratch_slot() const { return r.pages * r.size - 1; }
    long block_of(long text, long slot) const { return r.table[text * r.pages + slot / r.size]; }
    // Where a slot of a text is in a layer's keys or values.
    long in_cache(long text, long group, long slot) const {
        return ((block_of(text, slot) * s.groups + group) * r.size + slot % r.size) * s.channels;
    }
    // Where a row is in the memory of the trunk's states.
    long in_states(long row) const {
        long slot = slot_of(row);
        return (block_of(text_of(row), slot) * r.size + slot % r.size) * s.hidden;
    }
    // The state that a row of a depth continues; null for the trunk.
    const Float* given(long row) const {
        if (r.continued) return (const Float*)r.continued + in_states(row);
        return r.given ? (const Float*)r.given + row * s.hidden : nullptr;
    }
    long entry_of(long text) const { return r.entry[text]; }
    const Float* embedded(long row) const {
        return (const Float*)s.embedding + token_of(row) * s.hidden;
    }

    // The residual stream before the first layer.
    void start(Float* x, long thread, long threads) {
        if (s.merge) {
            for (long row = 0; row < all; row++) {
                normalize(embedded(row), s.embedded, s.hidden, x + 2 * row * s.hidden);
                normalize(given(row), s.given, s.hidden, x + (2 * row + 1) * s.hidden);
            }
            Share mine(s.hidden, thread, threads, LANES);
            product((const Float*)s.merge, x, all, 2 * s.hidden, mine,
                    [&](long row, long out, const float* four, int n) { keep(residual + row * s.hidden + out, four, n); });
        } else {
            Share mine(all, thread, threads);
            for (long row = mine.first; row < mine.last; row++) {
                const Float* from = given(row);
                if (!from) from = embedded(row);
                for (long h = 0; h < s.hidden; h++) residual[row * s.hidden + h] = to_float(from[h]);
            }
        }
        barrier.wait(thread, threads);
    }

    void normalized(Norm norm, Float* x) const {
        for (long row = 0; row < all; row++) normalize(residual + row * s.hidden, norm, s.hidden, x + row * s.hidden);
    }

    void add_product(const void* weight, const Float* x, long inputs, long thread, long threads) {
        Share mine(s.hidden, thread, threads, LANES);
        product((const Float*)weight, x, all, inputs, mine,
                [&](long row, long out, const float* four, int n) {
                    float* to = residual + row * s.hidden + out;
                    for (int i = 0; i < n; i++) to[i] += four[i];
                });
        barrier.wait(thread, threads);
    }

    void attention(long number, Float* x, long thread, long threads) {
        const Layer& layer = s.layer[number];
        normalized(layer.mixing, x);
        Share outputs(mixed, thread, threads, LANES);
        product((const Float*)layer.qkv, x, all, s.hidden, outputs,
                [&](long row, long out, const float* four, int n) { keep(qkv + row * mixed + out, four, n); });
        barrier.wait(thread, threads);
        Share heads(s.groups * all, thread, threads);
        for (long unit = heads.first; unit < heads.last; unit++) turn_and_keep(number, unit % s.groups, unit / s.groups);
        barrier.wait(thread, threads);
        Share mine(s.heads * r.batch, thread, threads);
        for (long unit = mine.first; unit < mine.last; unit++)
            attend(number, unit % s.heads, unit / s.heads, score + thread * r.rows * scores);
        barrier.wait(thread, threads);
        add_product(layer.proj, shared, attended, thread, threads);
    }

    // One row's queries of a group to `query`, its key and value to the cache.
    void turn_and_keep(long number, long group, long row) {
        const Layer& layer = s.layer[number];
        long each = s.heads / s.groups, text = text_of(row);
        float* from = qkv + row * mixed + group * (each + 2) * s.channels;
        for (long head = 0; head <= each; head++) {
            float* one = from + head * s.channels;
            Norm norm = head < each ? layer.query : layer.key;
            if (norm.weight) normalize(one, norm, s.channels, one);
            if (s.turns) turn(one, s.turns + position_of(row) * 2 * s.turned);
        }
        for (long head = 0; head < each; head++) {
            long to = ((text * s.heads + group * each + head) * r.rows + row / r.batch) * s.channels;
            copy(from + head * s.channels, query + to);
        }
        long slot = in_cache(text, group, slot_of(row));
        copy(from + each * s.channels, (Float*)r.keys[number] + slot);
        copy(from + (each + 1) * s.channels, (Float*)r.values[number] + slot);
    }

    void turn(float* one, const float* turns) const {
        const float *cosine = turns, *sine = turns + s.turned;
        long half = s.turned / 2;
        for (long c = 0; c < half; c++) {
            float a = one[c], b = one[c + half];
            one[c] = a * cosine[c] + b * sine[c];
            one[c + half] = b * cosine[c + half] + a * sine[c + half];
        }
    }

    void copy(const float* from, Float* to) const {
        for (long c = 0; c < s.channels; c++) put(to + c, from[c]);
    }

    // All rows of one head of a text, over the slots that any of them may look at.
    void attend(long number, long head, long text, float* score) {
        const float* mask = r.first ? nullptr : r.mask + text * r.rows * r.window;
        long last = position_of((r.rows - 1) * r.batch + text);
        long seen = mask ? last_seen(mask) : std::min(last + 1, (long)r.window), group = head / (s.heads / s.groups);
        auto values = [&](long slot) { return (const Float*)r.values[number] + in_cache(text, group, slot); };
        const Float* queries = query + (text * s.heads + head) * r.rows * s.channels;
        for (long from = 0; from < seen; from += r.size) {
            const Float* keys = (const Float*)r.keys[number] + in_cache(text, group, from);
            float* to = score + from;
            key_product(keys, queries, r.rows, s.channels, std::min(seen - from, (long)r.size),
                    [&](long row, long slot, const float* four, int n) { keep(to + row * scores + slot, four, n); });
        }
        for (long row = 0; row < r.rows; row++) {
            const float* own = mask ? mask + row * r.window : nullptr;
            long visible = mask ? seen : std::min(position_of(row * r.batch + text) + 1, seen);
            softmax(score + row * scores, own, s.layer[number].scale, visible, seen);
        }
        for (long row = 0; row < r.rows;) {
            auto some = [&](auto rows) {
                Float* to = shared + (row * r.batch + text) * attended + head * s.channels;
                mix_rows<decltype(rows)::value>(score + row * scores, scores, values, r.size, seen, s.channels, to,
                                                r.batch * attended);
                row += rows;
            };
            switch (r.rows - row) {
                case 1: some(std::integral_constant<int, 1>()); break;
                case 2: some(std::integral_constant<int, 2>()); break;
                default: some(std::integral_constant<int, 3>());
            }
        }
    }

    long last_seen(const float* mask) const {
        long last = 0;
        for (long row = 0; row < r.rows; row++)
            for (long w = r.window; w > last; w--)
                if (mask[row * r.window + w - 1] > VISIBLE) {
                    last = w;
                    break;
                }
        return last;
    }

    void mlp(const Layer& layer, Float* x, long thread, long threads) {
        normalized(layer.mlp, x);
        Share mine(s.ffn, thread, threads, LANES);
        const Float *gate = (const Float*)layer.gate, *up = (const Float*)layer.up;
        const long some = 2 * STRIPS * LANES;  // outputs whose two halves are put together while they are in the core's own cache
        float *gates = halves + 2 * thread * all * some, *ups = gates + all * some;
        for (long first = mine.first; first < mine.last; first += some) {
            Share part = mine.part(first, some);
            product(gate, x, all, s.hidden, part,
                    [&](long row, long out, const float* four, int n) { keep(gates + row * some + out - first, four, n); });
            product(up, x, all, s.hidden, part,
                    [&](long row, long out, const float* four, int n) { keep(ups + row * some + out - first, four, n); });
            for (long row = 0; row < all; row++)
                gated(gates + row * some, ups + row * some, part.last - first, shared + row * s.ffn + first);
        }
        barrier.wait(thread, threads);
        add_product(layer.down, shared, s.ffn, thread, threads);
    }

    // Where a text's rows stand for recurrent layers, and that they have run.
    void count_rows(long text) {
        long last = -1, count = 0;
        for (long row = text; row < all; row += r.batch) {
            long place = r.first ? in_chain(row) : r.places[place_of(row)];
            bool is_live = r.first ? place >= 0 : place != scratch_slot();
            slot[row] = is_live ? place - r.start[entry_of(text)] : -1;
            if (is_live) last = place, count++;
        }
        if (count) r.end[entry_of(text)] = last + 1;
    }

    void recurrent(long number, Float* x, long thread, long threads) {
        const Recurrent& one = *s.layer[number].recurrent;
        const Remembered& memory = r.remembered[number];
        const long columns = one.columns();
        normalized(s.layer[number].mixing, x);
        Share outputs(columns, thread, threads, LANES);
        product((const Float*)one.in, x, all, s.hidden, outputs,
                [&](long row, long out, const float* four, int n) { keep(projected + row * columns + out, four, n); });
        barrier.wait(thread, threads);
        Share channels(one.convolved(), thread, threads, LANES);
        for (long row = 0; row < all; row++) convolve(one, (Float*)memory.mixed, row, channels);
        barrier.wait(thread, threads);
        Share groups(one.groups * r.batch, thread, threads);
        for (long unit = groups.first; unit < groups.last; unit++)
            ask(one, memory.keys, unit % one.groups, unit / one.groups);
        barrier.wait(thread, threads);
        Share heads(one.heads * r.batch, thread, threads);
        for (long unit = heads.first; unit < heads.last; unit++)
            recall(one, memory, unit % one.heads, unit / one.heads, scratch + thread * most.scratch);
        barrier.wait(thread, threads);
        const long blocks = one.inner() / one.normed;
        Share parts(blocks * all, thread, threads);
        for (long unit = parts.first; unit < parts.last; unit++) gate(one, unit / blocks, unit % blocks);
        barrier.wait(thread, threads);
        add_product(one.out, shared, one.inner(), thread, threads);
    }

    // Some channels of a row, convolved with the rows before it, and their SiLU.
    void convolve(const Recurrent& one, Float* memory, long row, Share mine) {
        const long channels = one.convolved();
        float* to = convolved + row * channels;
        if (slot[row] < 0) {
            std::fill(to + mine.first, to + std::max(mine.first, mine.last), 0.0f);
            return;
        }
        Float* first = memory + (entry_of(text_of(row)) * (r.kept + one.width) + slot[row]) * channels;
        const float* from = projected + row * one.columns() + one.mixed_at();
        for (long c = mine.first; c < mine.last; c++) put(first + (one.width - 1) * channels + c, from[c]);
        for (long c = mine.first; c < mine.last; c += LANES) {
            const long count = std::min<long>(LANES, mine.last - c);
            auto read = [count](auto* values) { return count == LANES ? load(values) : load_part(values, count); };
            Vector sum = one.bias ? read(one.bias + c) : Vector{};
            for (long w = one.width - 1; w >= 0; w--)
                sum = fused(sum, read((const Float*)first + w * channels + c),
                            read(one.convolution + w * channels + c));
            sum = sum / (1 + exponential(-sum));
            if (count == LANES) store(to + c, sum);
            else for (long lane = 0; lane < count; lane++) to[c + lane] = sum[lane];
        }
    }

    // The queries of a group to `asked`, its keys to their slots, and all products of them to `overlap`.
    void ask(const Recurrent& one, float* memory, long group, long text) {
        const long key = one.key, unit = text * one.groups + group;
        const float shorter = one.is_delta() ? 1 / std::sqrt((float)key) : 1;
        float *queries = asked + 2 * unit * r.rows * key, *own = queries + r.rows * key;
        float* keys = memory + (entry_of(text) * one.groups + group) * (r.kept + 1) * key;
        long seen = 0;
        for (long i = 0; i < r.rows; i++) {
            const long row = i * r.batch + text;
            const float* from = convolved + row * one.convolved() + group * key;
            scale(from + one.query_at(), key, shorter * unit_factor(one, from + one.query_at()), queries + i * key);
            scale(from + one.key_at(), key, unit_factor(one, from + one.key_at()), own + i * key);
            if (slot[row] < 0) continue;
            memcpy(keys + slot[row] * key, own + i * key, key * sizeof(float));
            seen = std::max(seen, slot[row] + 1);
        }
        for (long side = 0; side < (one.is_delta() ? 2 : 1); side++) {
            float* to = overlaps(unit, side);
            key_product((const float*)keys, (const float*)queries + side * r.rows * key, r.rows, key, seen,
                    [&](long i, long at, const float* four, int n) { keep(to + i * r.kept + at, four, n); });
        }
    }

    // Of the queries (side 0) or keys (1) of a text's group with the keys in all slots, [rows, kept].
    float* overlaps(long unit, long side) const { return overlap + (2 * unit + side) * r.rows * r.kept; }

    static float unit_factor(const Recurrent& one, const float* x) {
        if (!one.unit_keys) return 1;
        float sum = 0;
        for (long c = 0; c < one.key; c++) sum += x[c] * x[c];
        return 1 / std::sqrt(sum + 1e-6f);
    }

    static void scale(const float* from, long count, float factor, float* to) {
        for (long c = 0; c < count; c++) to[c] = from[c] * factor;
    }

    // The rows of one head of a text: their values and decays to the slots, and what they see to `made`.
    void recall(const Recurrent& one, const Remembered& memory, long head, long text, float* scratch) {
        const long group = head / (one.heads / one.groups), unit = text * one.groups + group;
        const long here = entry_of(text) * one.heads + head;
        const float *queries = asked + 2 * unit * r.rows * one.key, *own = queries + r.rows * one.key;
        float *sums = memory.sums + here * (r.kept + 1), *values = memory.values + here * (r.kept + 1) * one.value;
        const float* state = memory.state + here * one.key * one.value;
        auto see = [&](const float* query, const float* score, long i, long at, long count, float* out) {
            const float left = std::exp(sums[at]);
            for (long n = 0; n < one.key; n++) scratch[n] = query[i * one.key + n] * left;
            mix(scratch, [&](long n) { return state + n * one.value; }, one.key, one.key, one.value, out);
            decayed(score + i * r.kept, sums, sums[at], count, scratch);
            float* more = scratch + std::max<long>(r.kept, one.key) + LANES;
            mix(scratch, [&](long w) { return (const float*)values + w * one.value; }, count, count, one.value, more);
            for (long p = 0; p < one.value; p++) out[p] += more[p];
        };
        for (long i = 0; i < r.rows; i++) {
            const long row = i * r.batch + text, at = slot[row];
            float* out = made + row * one.inner() + head * one.value;
            if (at < 0) {
                std::fill(out, out + one.value, 0.0f);
                continue;
            }
            const float* steps = projected + row * one.columns() + one.steps_at() + head;
            const float* from = convolved + row * one.convolved() + one.value_at() + head * one.value;
            float step = softplus(steps[one.is_delta() ? one.heads : 0] + one.step_bias[head]);
            sums[at] = (at ? sums[at - 1] : 0) - step * one.decay[head];
            if (one.is_delta()) {
                see(own, overlaps(unit, 1), i, at, at, out);
                step = 1 / (1 + std::exp(-steps[0]));
                for (long p = 0; p < one.value; p++) values[at * one.value + p] = (from[p] - out[p]) * step;
            } else
                scale(from, one.value, step, values + at * one.value);
            see(queries, overlaps(unit, 0), i, at, at + 1, out);
            if (one.skip)
                for (long p = 0; p < one.value; p++) out[p] += one.skip[head] * from[p];
        }
    }

    static float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

    // Scores times what is left of their slots where the decays sum up to `sum`.
    static void decayed(const float* score, const float* sums, float sum, long count, float* to) {
        long at = 0;
        for (; at + LANES <= count; at += LANES) store(to + at, load(score + at) * exponential(sum - load(sums + at)));
        for (; at < count; at++) to[at] = score[at] * std::exp(sum - sums[at]);
    }

    // Norm and gate of a block of a row's outputs, in this layer's order, to `shared`.
    void gate(const Recurrent& one, long row, long block) {
        const long inner = one.inner(), first = block * one.normed;
        float* values = made + row * inner + first;
        const float* gates = projected + row * one.columns() + one.gate_at() + first;
        Float* to = shared + row * inner + first;
        if (one.is_delta()) {
            normalize(values, one.norm, one.normed, values);
            gated(gates, values, one.normed, to);
        } else if (one.norm.weight) {
            gated(gates, values, one.normed, values);
            normalize(values, Norm{one.norm.weight + first, one.norm.eps}, one.normed, to);
        } else
            gated(gates, values, one.normed, to);
    }

    // silu(gate) * up
    template <class To>
    static void gated(const float* gate, const float* up, long count, To* to) {
        for (long at = 0; at < count; at += LANES) {  // the halves have room for whole vectors
            Vector g = load(gate + at), value = g / (1 + exponential(-g)) * load(up + at);
            if (at + LANES <= count) store(to + at, value);
            else for (long lane = 0; lane < count - at; lane++) put(to + at + lane, value[lane]);
        }
    }
};

template <class Float>
void forward(const Stack& stack, const Rows& rows, long threads) {
    Barrier barrier(threads);
    Forward<Float> one(stack, rows, threads, barrier);
#pragma omp parallel num_threads(threads)
    one.run(omp_get_thread_num(), omp_get_num_threads());
}

template <class Float>
void multiply(const void* weight, const void* x, void* to, long rows, long inputs, long outputs, long threads) {
    Float* result = (Float*)to;
    Barrier barrier(threads);
#pragma omp parallel num_threads(threads)
    {
        const long thread = omp_get_thread_num(), team = omp_get_num_threads();
        Share mine(outputs, thread, team, LANES);
        product((const Float*)weight, (const Float*)x, rows, inputs, mine,
                [&](long row, long out, const float* four, int n) { keep(result + row * outputs + out, four, n); });
        barrier.wait(thread, team);
    }
}

struct Best {  // the output of the largest product of a row, the first of equals
    float value = -INFINITY;
    int64_t out = 0;
};

// One pass after another: the most probable token after the last row of each goes where the next one reads it. Then the
// trunk: those drafts that are its most probable tokens, and the one after these, become tokens of their text, whose length
// grows. All in one region, in which the first thread does what is between forwards.
template <class Float>
class Stepping {
  public:
    Stepping(const GreedyStep& step, long most) : step(step), most(most), barrier(most), best(most) {}

    void run(long thread, long threads) {
        const auto began = std::chrono::steady_clock::now();
        for (long number = 0; number < step.count; number++) {
            const Pass& pass = step.passes[number];
            forward(pass, thread, threads);
            choose(pass, pass.rows - 1, thread, threads);
            for (long text = 0; text < step.batch && thread == 0; text++)
                step.drafted[text * step.draft_stride + number] = chosen(text, threads);
        }
        if (thread == 0) *step.drafting = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
        if (!step.trunk) return;
        forward(*step.trunk, thread, threads);
        choose(*step.trunk, 0, thread, threads);
        for (long text = 0; text < step.batch && thread == 0; text++) accept(text, threads);
    }

  private:
    const GreedyStep& step;
    const long most;
    Barrier barrier;
    std::optional<Forward<Float>> one;
    std::vector<Float> states, before;     // of a pass, and of the one before
    std::vector<std::vector<Best>> best;  // of every thread and row

    void forward(const Pass& pass, long thread, long threads) {
        if (thread == 0) prepare(pass);
        barrier.wait(thread, threads);
        one->run(thread, threads);
        barrier.wait(thread, threads);
    }

    void prepare(const Pass& pass) {
        const size_t size = pass.rows * step.batch * pass.stack->hidden;
        std::swap(states, before);
        states.resize(size);
        Rows rows = *pass.memory;
        rows.rows = pass.rows, rows.batch = step.batch, rows.window = step.window;
        rows.tokens = step.tokens, rows.token_stride = step.token_stride, rows.first = step.length;
        rows.by_place = 1, rows.offset = pass.offset, rows.ahead = pass.ahead;
        rows.drafted = step.drafted, rows.draft_stride = step.draft_stride;
        rows.states = states.data();
        if (pass.continues) rows.continued = step.states;
        else if (&pass != step.trunk) rows.given = before.data() + before.size() - size;
        one.emplace(*pass.stack, rows, most, barrier);
    }

    // The most probable tokens after all rows from `first` on.
    void choose(const Pass& pass, long first, long thread, long threads) {
        const long hidden = pass.stack->hidden, rows = (pass.rows - first) * step.batch;
        std::vector<Best> own(rows);
        product((const Float*)step.head, states.data() + first * step.batch * hidden, rows, hidden,
                Share(step.vocabulary, thread, threads, LANES), [&](long row, long out, const float* values, int n) {
                    for (int i = 0; i < n; i++)
                        if (values[i] > own[row].value) own[row] = {values[i], out + i};
                });
        best[thread] = std::move(own);
        barrier.wait(thread, threads);
    }

    int64_t chosen(long row, long threads) const {
        Best first = best[0][row];
        for (long thread = 1; thread < threads; thread++)
            if (best[thread][row].value > first.value) first = best[thread][row];
        return first.out;
    }

    void accept(long text, long threads) {
        const long rows = step.trunk->rows;
        const int64_t* drafted = step.drafted + text * step.draft_stride;
        int64_t *tokens = step.tokens + text * step.token_stride, *made = step.best + text * rows, gained = 1;
        int64_t& length = step.length[text];
        for (long row = 0; row < rows; row++) made[row] = chosen(row * step.batch + text, threads);
        while (gained < rows && drafted[gained - 1] == made[gained - 1]) gained++;
        for (long place = 0; place < gained && length + place < step.token_stride; place++)
            tokens[length + place] = made[place];
        length += step.gained[text] = gained;
    }
};

template <class Float>
void greedy_step(const GreedyStep& step, long threads) {
    Stepping<Float> one(step, threads);
#pragma omp parallel num_threads(threads)
    one.run(omp_get_thread_num(), omp_get_num_threads());
}

// ---- what Python calls, for weights of the type that the build names

typedef NUMBER Number;

extern "C" {

void run_rows(const Stack* stack, const Rows* rows, int64_t threads) { forward<Number>(*stack, *rows, threads); }

void run_step(const GreedyStep* step, int64_t threads) { greedy_step<Number>(*step, threads); }

// Numbers of a packed weight.
int64_t packed_size(int64_t outputs, int64_t inputs) { return strips_of(outputs) * strip_size<Number>(inputs); }

void pack_weight(const void* weight, int64_t outputs, int64_t inputs, void* to, int64_t threads) {
    pack((const Number*)weight, outputs, inputs, (Number*)to, threads);
}

// x [rows, inputs] @ weight [outputs, inputs]^T
void run_product(const void* weight, const void* x, void* to, int64_t rows, int64_t inputs, int64_t outputs,
                 int64_t threads) {
    multiply<Number>(weight, x, to, rows, inputs, outputs, threads);
}
}
