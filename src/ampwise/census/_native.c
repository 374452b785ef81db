/* Counting FP32, BF16 and FP16 values by exponent on a CPU, in one read.
 *
 * The reference is ampwise/census/reference.py; tests hold the two equal. Two things make it fast: all that can
 * be done on vectors is done on blocks that stay in the first-level cache, in loops a compiler vectorises; and
 * the histogram, which cannot, counts pairs of neighbours in one increment.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INFINITY_BITS 0x7f800000
#define FIRST_NORMAL 0x00800000
#define FIELDS 256        /* exponent field of the magnitude's predecessor; zero wraps around to 255 */
#define SUBNORMALS 24     /* by bit length of the predecessor, 0 to 23 */
#define BLOCK 4096
#define LANES 32
#define PAIRS (FIELDS * FIELDS)
#define FLUSH_AFTER (INT64_C(1) << 31)   /* values: before a 32-bit counter of pairs can overflow */

typedef enum { FP32, BF16, FP16 } Kind;

typedef struct {
    uint64_t fields[FIELDS];
    uint64_t subnormals[SUBNORMALS];
    uint64_t infs, nans;
    int32_t largest;       /* bits of the largest finite magnitude */
    int32_t smallest;      /* bits of the smallest magnitude above zero, less one */
    double sum_squares;    /* of the finite values */
} Tally;

static inline int32_t magnitude_of(uint32_t bits) { return (int32_t)(bits & 0x7fffffffu); }

static inline int32_t predecessor_of(uint32_t bits)
{
    return (int32_t)(((bits & 0x7fffffffu) - 1u) & 0x7fffffffu);
}

static inline float float_of(int32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* The FP32 bits of an FP16 magnitude. Nothing here is subnormal in FP32, so flushing subnormals does no harm. */
static inline uint32_t widened(uint16_t half)
{
    uint32_t magnitude = half & 0x7fffu;
    uint32_t normal = (magnitude << 13) + (112u << 23);
    uint32_t subnormal = bits_of((float)(int32_t)magnitude * 0x1p-24f);
    /* Masks and not branches, so that it can be done on vectors. */
    uint32_t is_small = -(uint32_t)(magnitude < 0x0400u), is_huge = -(uint32_t)(magnitude >= 0x7c00u);
    return (subnormal & is_small) | (normal & ~is_small) | (INFINITY_BITS & is_huge);
}

/* The FP32 bits of up to a block of values: where they are, or widened into the buffer. */
static const uint32_t *read_block(const void *values, int64_t first, int count, Kind kind, uint32_t *buffer)
{
    if (kind == FP32)
        return (const uint32_t *)values + first;
    const uint16_t *narrow = (const uint16_t *)values + first;
    if (kind == BF16)
        for (int i = 0; i < count; i++)
            buffer[i] = (uint32_t)narrow[i] << 16;
    else
        for (int i = 0; i < count; i++)
            buffer[i] = widened(narrow[i]);
    return buffer;
}

/* The fields of a whole block, and its extremes and sum of squares as if every value were ordinary. */
static float scan_block(const uint32_t *restrict bits, uint8_t *restrict fields, int32_t *largest, int32_t *smallest)
{
    float sums[LANES] = {0};
    int32_t highest[LANES] = {0}, lowest[LANES];
    for (int lane = 0; lane < LANES; lane++)
        lowest[lane] = INT32_MAX;
    for (int i = 0; i < BLOCK; i += LANES) {
        for (int lane = 0; lane < LANES; lane++) {
            int32_t magnitude = magnitude_of(bits[i + lane]);
            highest[lane] = magnitude > highest[lane] ? magnitude : highest[lane];
            float value = float_of(magnitude);
            sums[lane] += value * value;
        }
        for (int lane = 0; lane < LANES; lane++) {
            int32_t below = predecessor_of(bits[i + lane]);
            lowest[lane] = below < lowest[lane] ? below : lowest[lane];
            fields[i + lane] = (uint8_t)(below >> 23);
        }
    }
    float sum = 0;
    *largest = 0;
    *smallest = INT32_MAX;
    for (int lane = 0; lane < LANES; lane++) {
        sum += sums[lane];
        *largest = highest[lane] > *largest ? highest[lane] : *largest;
        *smallest = lowest[lane] < *smallest ? lowest[lane] : *smallest;
    }
    return sum;
}

static int bit_length(uint32_t value)
{
    int length = 0;
    for (; value; value >>= 1)
        length++;
    return length;
}

/* One value at a time, for blocks with infinities, NaNs, subnormals, or squares beyond what FP32 holds. */
static void scan_slowly(const uint32_t *bits, int count, Tally *tally)
{
    for (int i = 0; i < count; i++) {
        int32_t magnitude = magnitude_of(bits[i]), below = predecessor_of(bits[i]);
        if (magnitude >= INFINITY_BITS) {
            tally->infs += magnitude == INFINITY_BITS;
            tally->nans += magnitude > INFINITY_BITS;
            continue;
        }
        if (below < FIRST_NORMAL)
            tally->subnormals[bit_length((uint32_t)below)]++;
        double value = float_of(magnitude);
        tally->sum_squares += value * value;
        tally->largest = magnitude > tally->largest ? magnitude : tally->largest;
        tally->smallest = below < tally->smallest ? below : tally->smallest;
    }
}

static void scan(const uint32_t *bits, uint8_t *fields, Tally *tally)
{
    int32_t largest, smallest;
    float sum = scan_block(bits, fields, &largest, &smallest);
    /* Squares that FP32 rounds to nothing, or to infinity, are summed again in FP64. */
    int ordinary = largest < INFINITY_BITS && smallest >= FIRST_NORMAL && (sum > 1e-30f || largest == 0) && isfinite(sum);
    if (!ordinary) {
        scan_slowly(bits, BLOCK, tally);
        return;
    }
    tally->sum_squares += sum;
    tally->largest = largest > tally->largest ? largest : tally->largest;
    tally->smallest = smallest < tally->smallest ? smallest : tally->smallest;
}

/* Neighbouring pairs go to different tables: adding to one counter twice in a row has to wait. */
static void count_pairs(const uint8_t *fields, uint32_t *pairs)
{
    for (int i = 0; i < BLOCK; i += 8) {
        uint64_t eight;
        memcpy(&eight, fields + i, sizeof eight);
        pairs[eight & 0xffff]++;
        pairs[PAIRS + ((eight >> 16) & 0xffff)]++;
        pairs[(eight >> 32) & 0xffff]++;
        pairs[PAIRS + (eight >> 48)]++;
    }
}

static void empty_pairs(uint32_t *pairs, Tally *tally)
{
    for (int pair = 0; pair < PAIRS; pair++) {
        uint64_t seen = (uint64_t)pairs[pair] + pairs[PAIRS + pair];
        tally->fields[pair % FIELDS] += seen;
        tally->fields[pair / FIELDS] += seen;
    }
    memset(pairs, 0, 2 * PAIRS * sizeof *pairs);
}

/* Without a table of pairs, as for small tensors, each value is counted by itself. */
static void count(const void *values, int64_t n, Kind kind, uint32_t *pairs, Tally *tally)
{
    uint8_t fields[BLOCK];
    uint32_t buffer[BLOCK];
    int64_t i = 0;
    for (; i + BLOCK <= n; i += BLOCK) {
        scan(read_block(values, i, BLOCK, kind, buffer), fields, tally);
        if (!pairs) {
            for (int j = 0; j < BLOCK; j++)
                tally->fields[fields[j]]++;
            continue;
        }
        count_pairs(fields, pairs);
        if ((i + BLOCK) % FLUSH_AFTER == 0)
            empty_pairs(pairs, tally);
    }
    if (pairs)
        empty_pairs(pairs, tally);
    int left = (int)(n - i);
    const uint32_t *rest = read_block(values, i, left, kind, buffer);
    scan_slowly(rest, left, tally);
    for (int j = 0; j < left; j++)
        tally->fields[predecessor_of(rest[j]) >> 23]++;
}

static PyObject *list_of(const uint64_t *values, int count)
{
    PyObject *list = PyList_New(count);
    for (int i = 0; list && i < count; i++)
        PyList_SetItem(list, i, PyLong_FromUnsignedLongLong(values[i]));
    return list;
}

static PyObject *count_floats(PyObject *self, PyObject *args)
{
    unsigned long long address;
    long long n;
    int kind;
    (void)self;
    if (!PyArg_ParseTuple(args, "KLi", &address, &n, &kind))
        return NULL;
    if (n < 0 || (n > 0 && address == 0) || kind < FP32 || kind > FP16) {
        PyErr_SetString(PyExc_ValueError, "count_floats(address, n, kind): no values there, or a kind but 0, 1 or 2");
        return NULL;
    }
    /* Emptying the table costs as much as counting this many values one by one. */
    uint32_t *pairs = n > 4 * PAIRS ? calloc(2 * PAIRS, sizeof *pairs) : NULL;
    Tally tally;
    memset(&tally, 0, sizeof tally);
    tally.smallest = INT32_MAX;
    Py_BEGIN_ALLOW_THREADS
    count((const void *)(uintptr_t)address, n, (Kind)kind, pairs, &tally);
    Py_END_ALLOW_THREADS
    free(pairs);
    return Py_BuildValue("NNKKiid", list_of(tally.fields, FIELDS), list_of(tally.subnormals, SUBNORMALS),
                         (unsigned long long)tally.infs, (unsigned long long)tally.nans, (int)tally.largest,
                         (int)tally.smallest, tally.sum_squares);
}

static PyMethodDef methods[] = {
    {"count_floats", count_floats, METH_VARARGS,
     "count_floats(address, n, kind) -> (fields, subnormals, infs, nans, bits of amax, bits of amin less one, sum of squares)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&module); }
