/* Count FP32, BF16 and FP16 values by exponent on a CPU, in one read, optionally times a factor.
 *
 * The reference is ampwise/numbers/census/reference.py; tests hold the two equal. Two things make it fast: all that can
 * be done on vectors is done on blocks that stay in the first-level cache, in loops a compiler vectorises; and
 * the histogram, which cannot, counts pairs of neighbours in one increment where there are enough of them.
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
#define TABLES 4          /* of single values; more count faster and take longer to empty */
#define PAIRS (FIELDS * FIELDS)
#define MANY (2 * PAIRS)                 /* values: fewer are counted singly sooner than a table of pairs is emptied */
#define FLUSH_AFTER (INT64_C(1) << 31)   /* values: before a 32-bit counter of pairs can overflow */

typedef enum { FP32, BF16, FP16 } Kind;

/* Columns of a row, as in ampwise/numbers/census/count_row.py. */
enum { ZEROS, INFS, NANS, LARGEST, SMALLEST, BINADES, COLUMNS = BINADES + SUBNORMALS + FIELDS - 2 };

typedef struct {
    const void *values;
    int64_t n;
    Kind kind;
    Py_ssize_t row;
} Piece;

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

static inline float float_of(uint32_t bits)
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

static const uint32_t *widen(const uint16_t *narrow, int count, Kind kind, uint32_t *restrict buffer)
{
    if (kind == BF16)
        for (int i = 0; i < count; i++)
            buffer[i] = (uint32_t)narrow[i] << 16;
    else
        for (int i = 0; i < count; i++)
            buffer[i] = widened(narrow[i]);
    return buffer;
}

/* Multiply values by a factor. The input may already be in the buffer. */
static const uint32_t *multiply(const uint32_t *bits, int count, float factor, uint32_t *buffer)
{
    for (int i = 0; i < count; i++)
        buffer[i] = bits_of(float_of(bits[i]) * factor);
    return buffer;
}

/* Return the FP32 bits of up to a block of values, padded with zeros to full lanes: in place, or in the buffer. */
static const uint32_t *read_block(const Piece *piece, int64_t first, int count, float factor, uint32_t *buffer)
{
    const uint32_t *bits = piece->kind == FP32
        ? (const uint32_t *)piece->values + first
        : widen((const uint16_t *)piece->values + first, count, piece->kind, buffer);
    if (factor != 1)
        bits = multiply(bits, count, factor, buffer);
    if (count % LANES == 0)
        return bits;
    if (bits != buffer)
        memcpy(buffer, bits, (size_t)count * sizeof *buffer);
    for (int i = count; i % LANES; i++)
        buffer[i] = 0;
    return buffer;
}

/* Compute the fields of a block, its extremes and its sum of squares, as if every value were a normal number. */
static float scan_block(const uint32_t *restrict bits, int count, uint8_t *restrict fields, int32_t *largest,
                        int32_t *smallest)
{
    float sums[LANES] = {0};
    int32_t highest[LANES] = {0}, lowest[LANES];
    for (int lane = 0; lane < LANES; lane++)
        lowest[lane] = INT32_MAX;
    /* Pointers instead of an index: Python compiles with -fwrapv, where i + lane might wrap and prevent vectorisation. */
    for (const uint32_t *end = bits + count; bits < end; bits += LANES, fields += LANES) {
        for (int lane = 0; lane < LANES; lane++) {
            int32_t magnitude = magnitude_of(bits[lane]);
            highest[lane] = magnitude > highest[lane] ? magnitude : highest[lane];
            float value = float_of((uint32_t)magnitude);
            sums[lane] += value * value;
        }
        for (int lane = 0; lane < LANES; lane++) {
            int32_t below = predecessor_of(bits[lane]);
            lowest[lane] = below < lowest[lane] ? below : lowest[lane];
            fields[lane] = (uint8_t)(below >> 23);
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

/* Count one value at a time, for blocks with infinities, NaNs, subnormals, or squares out of FP32's range. */
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
        double value = float_of((uint32_t)magnitude);
        tally->sum_squares += value * value;
        tally->largest = magnitude > tally->largest ? magnitude : tally->largest;
        tally->smallest = below < tally->smallest ? below : tally->smallest;
    }
}

static void scan(const uint32_t *bits, int count, uint8_t *fields, Tally *tally)
{
    int32_t largest, smallest;
    float sum = scan_block(bits, count, fields, &largest, &smallest);
    /* Squares that underflow or overflow FP32 are summed again in FP64. */
    int is_summed = isfinite(sum) && (sum > 1e-30f || largest == 0);
    if (largest >= INFINITY_BITS || smallest < FIRST_NORMAL || !is_summed) {
        scan_slowly(bits, count, tally);
        return;
    }
    tally->sum_squares += sum;
    tally->largest = largest > tally->largest ? largest : tally->largest;
    tally->smallest = smallest < tally->smallest ? smallest : tally->smallest;
}

/* Neighbours, here and below, go to different tables: adding to one counter twice in a row would stall. */
static void count_singles(const uint8_t *fields, int count, uint32_t (*singles)[FIELDS])
{
    int i = 0;
    for (; i + TABLES <= count; i += TABLES)
        for (int table = 0; table < TABLES; table++)
            singles[table][fields[i + table]]++;
    for (; i < count; i++)
        singles[0][fields[i]]++;
}

static void empty_singles(uint32_t (*singles)[FIELDS], Tally *tally)
{
    for (int table = 0; table < TABLES; table++)
        for (int field = 0; field < FIELDS; field++)
            tally->fields[field] += singles[table][field];
    memset(singles, 0, TABLES * sizeof *singles);
}

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
    for (int high = 0; high < FIELDS; high++) {
        const uint32_t *one = pairs + high * FIELDS, *other = one + PAIRS;
        uint64_t seen_high = 0;
        for (int low = 0; low < FIELDS; low++) {
            uint64_t seen = (uint64_t)one[low] + other[low];
            tally->fields[low] += seen;
            seen_high += seen;
        }
        tally->fields[high] += seen_high;
    }
    memset(pairs, 0, 2 * PAIRS * sizeof *pairs);
}

/* The tables must be empty before, and are empty afterwards. */
static void count(const Piece *piece, float factor, uint32_t (*singles)[FIELDS], uint32_t *pairs, Tally *tally)
{
    uint8_t fields[BLOCK];
    uint32_t buffer[BLOCK];
    int in_pairs = piece->n >= MANY;
    for (int64_t i = 0; i < piece->n; i += BLOCK) {
        int here = piece->n - i < BLOCK ? (int)(piece->n - i) : BLOCK;
        scan(read_block(piece, i, here, factor, buffer), here, fields, tally);
        if (in_pairs && here == BLOCK)
            count_pairs(fields, pairs);
        else
            count_singles(fields, here, singles);
        if (in_pairs && (i + BLOCK) % FLUSH_AFTER == 0)
            empty_pairs(pairs, tally);
    }
    if (in_pairs)
        empty_pairs(pairs, tally);
    empty_singles(singles, tally);
}

static void write_row(const Tally *tally, int64_t *row)
{
    row[ZEROS] = (int64_t)(tally->fields[FIELDS - 1] - tally->nans);
    row[INFS] = (int64_t)tally->infs;
    row[NANS] = (int64_t)tally->nans;
    row[LARGEST] = tally->largest;
    row[SMALLEST] = INT32_MAX - tally->smallest;
    memcpy(row + BINADES, tally->subnormals, sizeof tally->subnormals);
    memcpy(row + BINADES + SUBNORMALS, tally->fields + 1, (FIELDS - 2) * sizeof *row);
    row[COLUMNS - 1] -= (int64_t)tally->infs;   /* the predecessor of infinity is the largest finite value */
}

static void count_all(const Piece *pieces, Py_ssize_t length, float factor, uint32_t *pairs, int64_t *rows,
                      double *sums)
{
    uint32_t singles[TABLES][FIELDS] = {{0}};
    for (Py_ssize_t i = 0; i < length; i++) {
        Tally tally = {.smallest = INT32_MAX};
        count(&pieces[i], factor, singles, pairs, &tally);
        write_row(&tally, rows + pieces[i].row * COLUMNS);
        sums[pieces[i].row] = tally.sum_squares;
    }
}

static int read_piece(PyObject *item, Piece *piece)
{
    unsigned long long address;
    long long n;
    int kind;
    Py_ssize_t row;
    if (!PyTuple_Check(item)) {
        PyErr_SetString(PyExc_TypeError, "count_floats: a piece is a tuple (address, n, kind, row)");
        return 0;
    }
    if (!PyArg_ParseTuple(item, "KLin", &address, &n, &kind, &row))
        return 0;
    if (n < 0 || (n > 0 && address == 0) || kind < FP32 || kind > FP16 || row < 0) {
        PyErr_SetString(PyExc_ValueError, "count_floats: no values there, a kind but 0, 1 or 2, or no row");
        return 0;
    }
    *piece = (Piece){(const void *)(uintptr_t)address, n, (Kind)kind, row};
    return 1;
}

/* Return NULL with an error set if a piece cannot be read; set has_many if a piece needs a table of pairs. */
static Piece *read_pieces(PyObject *list, int *has_many)
{
    Py_ssize_t length = PyList_Size(list);
    Piece *pieces = malloc((size_t)(length ? length : 1) * sizeof *pieces);
    if (!pieces)
        return (Piece *)PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < length; i++) {
        if (!read_piece(PyList_GetItem(list, i), &pieces[i])) {
            free(pieces);
            return NULL;
        }
        *has_many |= pieces[i].n >= MANY;
    }
    return pieces;
}

static PyObject *count_floats(PyObject *self, PyObject *args)
{
    PyObject *list;
    double factor;
    unsigned long long rows, sums;
    int has_many = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "O!dKK", &PyList_Type, &list, &factor, &rows, &sums))
        return NULL;
    Py_ssize_t length = PyList_Size(list);
    if (length > 0 && (rows == 0 || sums == 0)) {
        PyErr_SetString(PyExc_ValueError, "count_floats: nowhere to write the rows and sums to");
        return NULL;
    }
    Piece *pieces = read_pieces(list, &has_many);
    if (!pieces)
        return NULL;
    uint32_t *pairs = has_many ? calloc(2 * PAIRS, sizeof *pairs) : NULL;
    if (has_many && !pairs) {
        free(pieces);
        return PyErr_NoMemory();
    }
    Py_BEGIN_ALLOW_THREADS
    count_all(pieces, length, (float)factor, pairs, (int64_t *)(uintptr_t)rows, (double *)(uintptr_t)sums);
    Py_END_ALLOW_THREADS
    free(pairs);
    free(pieces);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"count_floats", count_floats, METH_VARARGS,
     "count_floats([(address, n, kind, row), ...], factor, rows, sums): write each piece's int64 counts to its row "
     "of the table at the first address, and its FP64 sum of squares to its place at the second"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&module); }
