/* Search of ID tables: beam search by code vectors or by a generator, or a scan of cells (cells.c);
   then ranking by codes or by embeddings.

   The plain search in search/beam.py and search/rank.py defines the results; tests compare the two.
   search/kernel.py fills the structures below, field by field. Nothing that is read from a table is
   trusted: rows out of range end the search with DAMAGED. native/build.py compiles this file in
   variants for different processors.

   A query goes through these parts, from top to bottom of the file:

     standardize_query()   scale the query, so that its products spread as an item's
     find_beams()          extend prefixes level by level: score_codes(), list_children(),
                           choose_children(), extend_frontier()
     rank_by_codes()       score the IDs under the beams, and keep the k best items
     rank_by_embeddings()  score these items again by their embeddings, if they are stored */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __AVX2__
#include <immintrin.h>
#elif defined(__GNUC__)
#pragma GCC diagnostic ignored "-Wpsabi" /* vectors are passed within this file only */
#endif

#ifdef _WIN32
#define API __declspec(dllexport)
#else
#define API __attribute__((visibility("default")))
#endif

/* Sizes of packed arrays, which kernel.py and packed.py know, too. */
enum { BLOCK = 64 };           /* outputs of a matrix, codes or rows that are processed together */
enum { GROUP_DIMENSIONS = 4 }; /* adjacent dimensions of code vectors in 16 bits */
enum { CODES = 256 };          /* maximum number of codes at a level, and the length of its row */

/* Limits that choose the quicker of two ways with the same result, up to rounding. */
enum { MAX_ID_COLUMNS = 16 };     /* longer IDs are not screened in blocks */
enum { MAX_INSERTION_SORT = 24 }; /* up to this many keys are sorted by insertion */
enum { MIN_SCREENED_ROWS = 8 };   /* fewer rows are scored one by one, without screening */
enum { LIMIT_SLACK = 32 };        /* scores that are collected, beyond 2 k, until the limit rises */
enum { VECTORS_PER_BATCH = 128 }; /* vectors that get their codes together */
enum { MAX_EXACT_DIMENSIONS = 64 }; /* code vectors of more dimensions are multiplied in 16 bits */

enum { DAMAGED = -1, NO_MEMORY = -2 }; /* statuses; other results are not negative */
enum { ZERO_DENSITY = 128 };           /* the byte of a density of 0 */

#ifdef __AVX512F__
enum { LANES = 16 };
#else
enum { LANES = 8 };
#endif
typedef float vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

/* An IdTable; the docstring of search/table.py has an example. */
typedef struct {
  const uint8_t *ids;          /* [rows][columns]: codes, then the bytes of half norm and density */
  const int32_t *starts;       /* rows at which a level's code changes, level after level */
  const int64_t *level_bounds; /* [columns + 1]: where each level's starts begin */
  const uint8_t *start_codes;  /* the codes at the first num_start_codes of starts */
  const int32_t *bucket_starts; /* [rows + 1]: where the items of each ID begin */
  const int32_t *items;
  int64_t columns, rows, num_items, num_start_codes;
} Table;

/* A table, and its items that may be returned. */
typedef struct {
  const Table *table;
  const uint64_t *words;    /* bits of the rows with an allowed item; NULL: all items are allowed */
  const int32_t *before;    /* number of set bits before each word */
  const uint8_t *allowed;   /* 1 for each allowed item */
  const void *embeddings;   /* [items][...], as search/vectors.py stores them; NULL: not compared */
  const uint16_t *scales;   /* [items], in half precision, of embeddings of less than 16 bits */
  int64_t embedding_bytes;  /* of all items */
  const uint8_t *densities; /* [items]; NULL: densities cost nothing */
  /* of fine codes, by position in table->items: [blocks][fine_codes / 2][16] */
  const uint8_t *fine;
  const int32_t *cell_starts;    /* position of the first item of each cell, and the end */
  const uint64_t *positions;     /* bits of the positions of allowed items; NULL: all are allowed */
  const int32_t *sampled_counts; /* allowed items in the sampled cells: [modalities][num_sampled] */
  const int64_t *allowed_counts; /* allowed items with each code of a modality */
  const uint8_t *lengths;        /* [items], factors of the vectors of codes; NULL with 16 bits */
} Part;

/* A generator, as nn/packed.py arranges it; matrices are packed as for matrix_product(). */
typedef struct {
  int64_t width, feedforward, heads, head_width, prefixes, blocks;
  /* from a query to its prefix vectors: [prefixes][width] */
  const float *prefix_weights, *prefix_biases;
  /* from a prefix vector to keys and values: [blocks][2][heads][head_width] */
  const float *prefix_keys_values;
  /* from a head's keys or values to the space of tokens: [blocks][2][heads] */
  const float *prefix_sides;
  /* queries, keys and values, in the first block, of the start token and of all codes:
     [tokens][3][heads][head_width] */
  const float *tokens;
  const float *embeddings;            /* of the same tokens: [tokens][width] */
  const float *distances;             /* added to self-attention, by distance: [heads][levels] */
  const float *token;                 /* from a token to queries, keys and values: [blocks] */
  const float *token_out, *up, *down; /* [blocks] */
  const float *codes;          /* from a hidden state to the codes' logits, level after level */
  const float *scales, *gates; /* weights of nearness and of the logits: [levels] */
  const float *biases;         /* added to both: [levels][CODES] */
} Generator;

typedef struct {
  int64_t levels, dim;
  int64_t gram_levels;           /* levels that gram covers */
  int64_t first_level;           /* the first level of semantic codes */
  int64_t num_constant;          /* directions that have the same product with every item */
  const Generator *generator;    /* NULL: codes are scored by nearness alone */
  const int32_t *sizes;          /* codes of each level, at most CODES */
  const float *vectors;          /* code vectors, level after level: [codes][dim] */
  const uint8_t *bytes;          /* code vectors / steps in 16 bits, packed for multiply_block() */
  const float *steps;            /* [codes] */
  const float *halves;           /* w |e|^2 / 2 of each code vector e: [levels][CODES] */
  const float *gram;             /* w e·f of code vectors e and f of the first levels:
                                    [codes][gram_levels][CODES] */
  const float *residual_weights; /* of each dimension, with 1, 2, 4 and 8 bits: [4][dim] */
  const float *constant;         /* the constant directions: [num_constant][dim] */
  /* Cells and fine codes; search.c's cells.c uses them. */
  int64_t fine_codes;           /* of an item; 0: IDs are whole */
  int64_t grid[3];              /* codes of modalities, first and second codes; 1 without a level */
  int64_t cell_dim;             /* dimensions of cell_vectors: a multiple of 16 */
  int64_t num_sampled;          /* cells in the sample */
  const int8_t *cell_vectors;   /* code vectors / steps, level after level: [codes][cell_dim] */
  const float *cell_steps;      /* [codes] */
  const int16_t *cell_costs;    /* w |v|^2 / 2 of cells / largest_cell_cost * 32767 */
  const int32_t *sampled_cells; /* first and second codes: [num_sampled][2] */
  const float *fine_vectors;    /* [dim][16] */
  const int32_t *fine_ends;     /* end of the dimensions of each fine code but the last */
  const float *fine_norms;      /* half norms that the last fine code stands for: [16] */
  float norm_weight;            /* the weight w */
  float largest_cell_cost;
} Model;

/* The request of one query. */
typedef struct {
  int64_t first_part; /* its parts among those of all queries */
  int64_t width;      /* beam width */
  /* decoding ends once at most this many IDs, or width, if larger, are under the beams */
  int64_t candidates;
  int64_t k;          /* number of hits by codes; 0 lists all items under the beams, unranked */
  int64_t compared_k; /* number of hits by embeddings among them; 0: no embeddings are compared */
  int64_t compared_bits; /* bits per number of an embedding; less than 16: residuals are stored */
  uint8_t level0[CODES / 8]; /* bit vector of the allowed codes at level 0 */
  /* costs of one step of the two bytes after an ID's codes */
  float half_norm_step, density_step;
  /* cost of one step of a density where embeddings are compared, before it fades */
  float compared_density_step;
  /* share of the items that the query may find, by their first semantic code: [CODES] */
  const float *usage;
  float reference;  /* standard deviation of an item's products; see standardize_query() */
  float fade_width; /* densities count less for products within this of 1 */
  float margin;     /* deviations of sums over fine codes by which a cell may be behind */
  int64_t first_rows; /* items that are scanned before cells are left out */
} Request;

typedef struct {
  int64_t part, item, row, beam;
  float score, unused;
} Hit;

/* The result of one query. */
typedef struct {
  int64_t num_hits;
  int64_t touched; /* items under the beams */
} Result;

typedef struct {
  int32_t row, code; /* row of the frontier, and the code that follows it */
  int32_t count;     /* allowed IDs below */
  float total;       /* score of the prefix with this code */
} Child;

/* An ID under a beam. */
typedef struct {
  int32_t part, row, beam;
  float score;
} Leaf;

typedef struct {
  void *at;
  size_t bytes;
} Buffer;

/* The memory of a search, reused by the next one. The frontier is the prefixes that are extended at
   a level; its rows are the beams of the query. */
typedef struct {
  const Hit *hits; /* hits of all queries, query after query */
  /* log-probabilities of the codes of each hit's beam: [hits][levels]; NaN: not decoded */
  const float *decoded;
  const Result *results; /* [queries] */
  const Part *parts;
  int64_t num_parts;
  Buffer hit_buffer, decoded_buffer, result_buffer, chosen;
  /* the frontier: [rows][levels], [rows][levels], [rows], [rows][parts][2] */
  Buffer codes, gained, total, ranges;
  Buffer next_codes, next_gained, next_total, next_ranges;
  Buffer logits, generated; /* [rows][CODES] */
  /* of a query's prefix vectors, in the space of tokens: [blocks][2][heads][prefixes][width] */
  Buffer keys_values;
  /* of all frontiers so far, as in Generator, in the later blocks: [tokens][blocks - 1] */
  Buffer tokens;
  Buffer parents;               /* the token before each of them */
  Buffer hidden, normed, inner; /* of the generator: one row for each row of the frontier */
  Buffer children, spans;       /* [children], [children][parts][2] */
  Buffer buckets, keys, leaves, best;
  /* of the query and code vectors: [levels][CODES]; then the costs of an ID's bytes: [2][CODES] */
  Buffer products;
  Buffer scaled, weighed;           /* the query, scaled; and as residuals are compared with it */
  Buffer short_query, packed_query; /* the query in 16 bits; and as packed rows multiply it */
  Buffer scores;                    /* of hits by their embeddings */
  Buffer cells, bases, kept, sums;  /* of the scan of cells */
  int64_t rows, below, num_children, num_keys, num_leaves, num_hits, touched;
  int64_t first_token; /* of the frontier */
} Work;

static int reserve(Buffer *buffer, int64_t count, size_t size) {
  size_t bytes = (size_t)count * size;
  if (bytes <= buffer->bytes) return 1;
  bytes += bytes / 2 + 1024;
  void *at = realloc(buffer->at, bytes);
  if (!at) return 0;
  buffer->at = at;
  buffer->bytes = bytes;
  return 1;
}

static void swap(Buffer *first, Buffer *second) {
  Buffer saved = *first;
  *first = *second;
  *second = saved;
}

/* Matrix products

     y[q][o] = sum over i of x[q][i] * weights[o / BLOCK][i][o % BLOCK]

   Weights are stored in blocks of BLOCK outputs: [block][in][BLOCK]. */

static inline __attribute__((always_inline)) void multiply_weight_block(
    const float *weights, int64_t in, const float *x, int64_t stride, float *y, int64_t y_stride,
    const int inputs, const int vectors) {
  for (int first = 0; first < BLOCK; first += vectors * LANES) {
    vec sums[8] = {0};
    const float *w = weights + first;
    for (int64_t i = 0; i < in; i++, w += BLOCK)
      for (int q = 0; q < inputs; q++)
        for (int v = 0; v < vectors; v++)
          sums[q * vectors + v] += *(const vec *)(w + v * LANES) * x[q * stride + i];
    for (int q = 0; q < inputs; q++)
      for (int v = 0; v < vectors; v++)
        *(vec *)(y + q * y_stride + first + v * LANES) = sums[q * vectors + v];
  }
}

/* Compute y[n][out] from x[n][in]. Four inputs at a time share the weights that are read. */
static void matrix_product(const float *weights, int64_t in, int64_t out, const float *x,
                           int64_t stride, float *y, int64_t y_stride, int64_t n) {
  for (int64_t o = 0; o < out; o += BLOCK, weights += in * BLOCK, y += BLOCK) {
    int64_t q = 0;
    for (; q + 4 <= n; q += 4)
      multiply_weight_block(weights, in, x + q * stride, stride, y + q * y_stride, y_stride, 4, 2);
    for (; q < n; q++)
      multiply_weight_block(weights, in, x + q * stride, stride, y + q * y_stride, y_stride, 1,
                            BLOCK / LANES);
  }
}

static inline int64_t padded(int64_t size) { return (size + BLOCK - 1) / BLOCK * BLOCK; }

/* Inner products with rows of numbers: sum over i of row[i] * y[i] */

static inline float sum_lanes(vec x) {
#ifdef __AVX512F__
  return _mm512_reduce_add_ps((__m512)x);
#else
  float sum = 0;
  for (int lane = 0; lane < LANES; lane++) sum += x[lane];
  return sum;
#endif
}

/* Numbers in half precision. Shifting the bits of a half by 13 gives a float whose exponent is too
   small by 112, the difference of the biases 127 and 15; infinity becomes 65536. */

static inline float half_to_float(uint16_t half) {
  uint32_t bits = (uint32_t)(half & 0x8000) << 16 | (uint32_t)(half & 0x7fff) << 13;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value * 0x1p112f;
}

static inline vec halves_to_floats(const uint16_t *halves) { /* LANES numbers */
  typedef int16_t shorts __attribute__((vector_size(LANES * 2)));
  typedef int32_t ints __attribute__((vector_size(LANES * 4)));
  typedef uint32_t words __attribute__((vector_size(LANES * 4)));
  shorts narrow;
  memcpy(&narrow, halves, sizeof narrow);
  return (vec)((words) __builtin_convertvector(narrow, ints) << 13 & 0x8fffffff) * 0x1p112f;
}

static inline __attribute__((always_inline)) float multiply_row(const void *row, const float *y,
                                                                int64_t n, const int is_half) {
  const uint16_t *halves = row;
  const float *x = row;
  vec sums[4] = {0};
  int64_t i = 0;
  for (; i + 4 * LANES <= n; i += 4 * LANES)
    for (int j = 0, at = (int)i; j < 4; j++, at += LANES)
      sums[j] += (is_half ? halves_to_floats(halves + at) : *(const vec *)(x + at)) *
                 *(const vec *)(y + at);
  for (; i + LANES <= n; i += LANES)
    sums[0] +=
        (is_half ? halves_to_floats(halves + i) : *(const vec *)(x + i)) * *(const vec *)(y + i);
  float sum = sum_lanes(sums[0] + sums[1] + (sums[2] + sums[3]));
  for (; i < n; i++) sum += (is_half ? half_to_float(halves[i]) : x[i]) * y[i];
  return sum;
}

static float dot(const float *x, const float *y, int64_t n) { return multiply_row(x, y, n, 0); }

static void add_scaled(float *x, float scale, const float *y, int64_t n) {
  for (int64_t i = 0; i < n; i++) x[i] += scale * y[i];
}

/* Compute y[r] = rows[r] · x. Four rows at a time share the numbers of x that are read. */
static void multiply_rows(const float *rows, int64_t n, int64_t dim, const float *x, float *y) {
  int64_t r = 0;
  for (; r + 4 <= n; r += 4, rows += 4 * dim) {
    vec sums[4] = {0};
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES)
      for (int j = 0; j < 4; j++)
        sums[j] += *(const vec *)(rows + j * dim + i) * *(const vec *)(x + i);
    for (int j = 0; j < 4; j++) {
      float sum = sum_lanes(sums[j]);
      for (int64_t d = i; d < dim; d++) sum += rows[j * dim + d] * x[d];
      y[r + j] = sum;
    }
  }
  for (; r < n; r++, rows += dim) y[r] = dot(rows, x, dim);
}

/* Round a query to integers in 16 bits, query[i] ≈ step * rounded[i], and return the step.

   The step is a power of two, which keeps small integers exact. It is large enough for

     |rounded[i]| <= 32512 = 127 * 256, so that both bytes are signed, and
     |sum over i of row[i] * rounded[i]| <= most * sqrt(dim) * |rounded| < 2^31,

   so that products with rows of integers up to ``most`` fit into 32 bits. */
static float round_query(const float *query, int64_t dim, float most, int16_t *rounded) {
  float largest = 0, norm = sqrtf(dot(query, query, dim));
  for (int64_t i = 0; i < dim; i++) largest = fabsf(query[i]) > largest ? fabsf(query[i]) : largest;
  float step = largest / 32512, coarse = norm * sqrtf((float)dim) * (most / 2e9f);
  if (coarse > step) step = coarse;
  if (step > 0) step = exp2f(ceilf(log2f(step)));
  for (int64_t i = 0; i < dim; i++) rounded[i] = step > 0 ? (int16_t)lrintf(query[i] / step) : 0;
  return step;
}

/* A rounded query, arranged as packed rows of integers multiply it.

   A row of ``bits`` per number has its first ``width`` numbers in the lowest bits of its bytes, the
   next ``width`` numbers in the bits above, and so on (search/vectors.py). The query has the same
   order: 8 / bits runs of ``width`` numbers, each padded with zeros to ``stride``. Number q is
   split into two signed bytes, q = 256 * upper + lower. */
typedef struct {
  int64_t width, stride; /* bytes of a row, and rounded up to a multiple of BLOCK */
  const int16_t *query;
  const int8_t *upper, *lower;
  int32_t sum, sum_of_upper, sum_of_lower; /* modulo 2^32; products, which are exact, fit */
} Packed;

static Packed pack_query(const int16_t *rounded, int64_t dim, int bits, int16_t *memory) {
  int64_t width = (dim * bits + 7) / 8, stride = padded(width), size = stride * (8 / bits);
  int8_t *upper = (int8_t *)(memory + size), *lower = upper + size;
  int32_t sum_of_upper = 0, sum_of_lower = 0;
  memset(memory, 0, (size_t)size * sizeof(int16_t));
  for (int64_t i = 0, first = 0; first < dim; i += stride, first += width)
    memcpy(memory + i, rounded + first,
           (size_t)(dim - first < width ? dim - first : width) * sizeof(int16_t));
  for (int64_t i = 0; i < size; i++) {
    lower[i] = (int8_t)(memory[i] & 255);
    upper[i] = (int8_t)((memory[i] - lower[i]) / 256);
    sum_of_upper += upper[i];
    sum_of_lower += lower[i];
  }
  int32_t sum = (int32_t)(256 * (uint32_t)sum_of_upper + (uint32_t)sum_of_lower);
  return (Packed){width, stride, memory, upper, lower, sum, sum_of_upper, sum_of_lower};
}

/* Compute the products of a rounded query q and BLOCK code vectors n in 16 bits, in units of the
   steps of both.

   Numbers n = 256 * (a - 128) + (b - 128) are stored as unsigned bytes a and b:
   [groups][2][BLOCK][GROUP_DIMENSIONS], a before b. With q = 256 * x + y, all sums over dimensions,
   and exact in 32 bits:

     high   = sum (a - 128) * x
     middle = sum (a - 128) * y + (b - 128) * x
     low    = sum (b - 128) * y
     n · q  = 65536 * high + 256 * middle + low

   Without instructions for unsigned times signed bytes, q is not split:

     n · q  = 256 * (sum a * q - 128 * sum q) + (sum b * q - 128 * sum q) */
static inline void multiply_block(const uint8_t *bytes, int64_t groups, const Packed *p,
                                  float *products) {
  enum { PLANE = BLOCK * GROUP_DIMENSIONS };
#ifdef __AVX512VNNI__
  enum { WIDTH = PLANE / 64 };
  __m512i high[WIDTH], middle[WIDTH], low[WIDTH];
  for (int v = 0; v < WIDTH; v++) {
    high[v] = _mm512_set1_epi32(-128 * p->sum_of_upper);
    middle[v] = _mm512_set1_epi32(-128 * (p->sum_of_upper + p->sum_of_lower));
    low[v] = _mm512_set1_epi32(-128 * p->sum_of_lower);
  }
  for (int64_t g = 0; g < groups; g++, bytes += 2 * PLANE) {
    int32_t upper, lower;
    memcpy(&upper, p->upper + g * GROUP_DIMENSIONS, GROUP_DIMENSIONS);
    memcpy(&lower, p->lower + g * GROUP_DIMENSIONS, GROUP_DIMENSIONS);
    __m512i x = _mm512_set1_epi32(upper), y = _mm512_set1_epi32(lower);
    for (int v = 0; v < WIDTH; v++) {
      __m512i a = _mm512_loadu_si512(bytes + v * 64),
              b = _mm512_loadu_si512(bytes + PLANE + v * 64);
      high[v] = _mm512_dpbusd_epi32(high[v], a, x);
      middle[v] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(middle[v], a, y), b, x);
      low[v] = _mm512_dpbusd_epi32(low[v], b, y);
    }
  }
  for (int v = 0; v < WIDTH; v++)
    _mm512_storeu_ps(products + v * 16, 65536 * _mm512_cvtepi32_ps(high[v]) +
                                            256 * _mm512_cvtepi32_ps(middle[v]) +
                                            _mm512_cvtepi32_ps(low[v]));
#elif defined(__AVX2__)
  enum { CHAINS = 4, PART = CHAINS * 4 }; /* codes at a time */
  __m256i offset = _mm256_set1_epi32((int32_t)(128 * (uint32_t)p->sum));
  for (int first = 0; first < BLOCK; first += PART) {
    __m256i sums[2][CHAINS] = {{{0}}};
    const uint8_t *codes = bytes + first * GROUP_DIMENSIONS;
    for (int64_t g = 0; g < groups; g++, codes += 2 * PLANE) {
      int64_t four;
      memcpy(&four, p->query + g * GROUP_DIMENSIONS, sizeof four);
      __m256i x = _mm256_set1_epi64x(four);
      for (int half = 0; half < 2; half++)
        for (int v = 0; v < CHAINS; v++) {
          __m256i numbers = _mm256_cvtepu8_epi16(
              _mm_loadu_si128((const __m128i *)(codes + half * PLANE + v * 16)));
          sums[half][v] = _mm256_add_epi32(sums[half][v], _mm256_madd_epi16(x, numbers));
        }
    }
    for (int v = 0; v < CHAINS; v += 2) { /* two sums of each code are adjacent */
      __m256 parts[2];
      for (int half = 0; half < 2; half++) {
        __m256i numbers =
            _mm256_permute4x64_epi64(_mm256_hadd_epi32(sums[half][v], sums[half][v + 1]), 0xd8);
        parts[half] = _mm256_cvtepi32_ps(_mm256_sub_epi32(numbers, offset));
      }
      _mm256_storeu_ps(products + first + v * 4, 256 * parts[0] + parts[1]);
    }
  }
#else
  uint32_t sums[2][BLOCK] = {{0}}, offset = 128 * (uint32_t)p->sum;
  for (int64_t i = 0; i < 2 * groups; i++, bytes += PLANE) {
    const int16_t *query = p->query + i / 2 * GROUP_DIMENSIONS;
    for (int c = 0; c < BLOCK; c++) {
      const uint8_t *codes = bytes + c * GROUP_DIMENSIONS;
      sums[i & 1][c] += (uint32_t)(codes[0] * query[0] + codes[1] * query[1] + codes[2] * query[2] +
                                   codes[3] * query[3]);
    }
  }
  for (int c = 0; c < BLOCK; c++)
    products[c] =
        256 * (float)(int32_t)(sums[0][c] - offset) + (float)(int32_t)(sums[1][c] - offset);
#endif
}

/* Scores of codes

   After a prefix with the vector v (the sum of its code vectors), a code with the vector e gains

     (q - w v)·e - w |e|^2 / 2  =  q·e - w v·e - w |e|^2 / 2

   for the scaled query q and the weight w of norms. The products q·e are in ``products``, w v·e are
   sums of rows of ``gram``, and w |e|^2 / 2 are ``halves``. */

/* Compute the products of a level's code vectors and the query, unless standardize_query() has. */
static void multiply_level(const Model *m, Work *w, int64_t level, const float *query) {
  int64_t first = 0;
  if (level == m->first_level) return;
  for (int64_t l = 0; l < level; l++) first += m->sizes[l];
  multiply_rows(m->vectors + first * m->dim, m->sizes[level], m->dim, query,
                (float *)w->products.at + level * CODES);
}

/* Scale a query, and return the factor:

     p[c]   = q · (code vector c of the first semantic level)
     factor = reference / sqrt(variance of p, weighted by usage)

   usage[c] is the share of the items that the query may find with code c, and reference the
   standard deviation of such products of an item. So the products of the scaled query spread as
   those of an item, and costs are in proportion to the differences between its products. */
static float scale_query(const Request *request, const float *query, int64_t dim, float *products,
                         int64_t size, float *scaled) {
  float mean = dot(request->usage, products, size), variance = 0;
  for (int64_t c = 0; c < size; c++)
    variance += request->usage[c] * (products[c] - mean) * (products[c] - mean);
  float factor = variance > 0 && request->reference > 0 ? request->reference / sqrtf(variance) : 1;
  for (int64_t c = 0; c < size; c++) products[c] *= factor;
  for (int64_t i = 0; i < dim; i++) scaled[i] = query[i] * factor;
  return factor;
}

/* Compute the products of the first semantic level, and scale the query by them. */
static float standardize_query(const Model *m, const Request *request, const float *query,
                               Work *w) {
  float *products = (float *)w->products.at + m->first_level * CODES;
  const float *vectors = m->vectors;
  int64_t size = m->sizes[m->first_level];
  for (int64_t l = 0; l < m->first_level; l++) vectors += m->sizes[l] * m->dim;
  multiply_rows(vectors, size, m->dim, query, products);
  return scale_query(request, query, m->dim, products, size, w->scaled.at);
}

/* Score every code of a level after a prefix by nearness to the query. Levels without gram compute
   the residual r = q - w v, and r·e - w |e|^2 / 2. */
static int score_nearness(const Model *m, Work *w, int64_t level, const uint8_t *codes,
                          const float *query, float *scores) {
  const float *halves = m->halves + level * CODES,
              *products = (float *)w->products.at + level * CODES;
  if (level < m->gram_levels) {
    const float *gram = m->gram + level * CODES;
    for (int c = 0; c < CODES; c++) scores[c] = products[c] - halves[c];
    for (int64_t l = 0; l < level; l++) {
      const float *row = gram + codes[l] * m->gram_levels * CODES;
      for (int c = 0; c < CODES; c += LANES) *(vec *)(scores + c) -= *(const vec *)(row + c);
      gram += m->sizes[l] * m->gram_levels * CODES;
    }
    return 1;
  }
  if (!reserve(&w->buckets, m->dim, sizeof(float))) return 0;
  float *residual = w->buckets.at;
  const float *vectors = m->vectors;
  memcpy(residual, query, (size_t)m->dim * sizeof(float));
  for (int64_t l = 0; l < level; vectors += m->sizes[l] * m->dim, l++)
    add_scaled(residual, -m->norm_weight, vectors + codes[l] * m->dim, m->dim);
  multiply_rows(vectors, m->sizes[level], m->dim, residual, scores);
  for (int64_t c = 0; c < m->sizes[level]; c++) scores[c] -= halves[c];
  return 1;
}

/* The generator: T5's decoder (nn/generator.py), whose weights nn/packed.py folds

   Each block computes, for the last token of each row of the frontier, with x its hidden state and
   norm(x) = x / sqrt(|x|^2 + width * 1e-6):

     x = x + self-attention to the tokens of the row
     x = x + cross-attention of norm(x) to the prefix vectors of the query
     x = x + down(relu(up(norm(x))))

   Factors such as sqrt(width) and the weights of norms are folded into the matrices. */

static void normalize(const Generator *g, const float *x, float *y) { /* to unit length */
  float scale = 1 / sqrtf(dot(x, x, g->width) + (float)g->width * 1e-6f);
  for (int64_t i = 0; i < g->width; i++) y[i] = x[i] * scale;
}

static float find_largest(const float *x, int64_t n) {
  float largest[4] = {x[0], x[0], x[0], x[0]};
  for (int64_t i = 1; i < n; i++) largest[i & 3] = x[i] > largest[i & 3] ? x[i] : largest[i & 3];
  for (int lane = 1; lane < 4; lane++)
    largest[0] = largest[lane] > largest[0] ? largest[lane] : largest[0];
  return largest[0];
}

/* Replace values by their exponentials, relative to the largest value; return their sum. */
static float exponentiate(float *x, int64_t n, float largest) {
  float sum = 0;
  for (int64_t i = 0; i < n;
       i++) { /* e^x = 2^k e^r with |r| <= ln(2) / 2, and a polynomial for e^r */
    float value = x[i] - largest > -87 ? x[i] - largest : -87;
    int32_t k = (int32_t)(value * 1.44269504f - 0.5f), bits = (k + 127) << 23;
    float r = value - (float)k * 0.693359375f + (float)k * 2.12194440e-4f, power;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    memcpy(&power, &bits, sizeof power);
    x[i] = (p * r * r + r + 1) * power;
  }
  for (int64_t i = 0; i < n; i++) sum += x[i];
  return sum;
}

/* Compute the keys and values of the prefix vectors of a query, at unit length. */
static int project_query(const Model *m, Work *w, const float *query) {
  const Generator *g = m->generator;
  int64_t heads = 2 * g->heads * g->blocks, width = g->width,
          stride = padded(heads * g->head_width);
  int64_t side = padded(width), size = padded(g->prefixes * width);
  if (!reserve(&w->keys_values, (heads * g->prefixes + 1) * side, sizeof(float)) ||
      !reserve(&w->inner, size + g->prefixes * stride, sizeof(float)))
    return 0;
  float *vectors = w->inner.at, *projected = vectors + size, *sides = w->keys_values.at;
  matrix_product(g->prefix_weights, m->dim, g->prefixes * width, query, 0, vectors, 0, 1);
  float length = sqrtf(dot(query, query, m->dim));
  for (int64_t i = 0; i < g->prefixes * width; i++)
    vectors[i] = vectors[i] / (length > 0 ? length : 1) + g->prefix_biases[i];
  for (int64_t p = 0; p < g->prefixes; p++) normalize(g, vectors + p * width, vectors + p * width);
  matrix_product(g->prefix_keys_values, width, stride, vectors, width, projected, stride,
                 g->prefixes);
  for (int64_t h = 0; h < heads; h++)
    matrix_product(g->prefix_sides + h * g->head_width * side, g->head_width, width,
                   projected + h * g->head_width, stride, sides + h * g->prefixes * side, side,
                   g->prefixes);
  return 1;
}

/* Compute, in a block, the self-attention of the last token of a row to all tokens of the row. In
   the first block, queries, keys and values depend on the token alone, so they are looked up. */
static void attend_to_tokens(const Model *m, const Work *w, int64_t level, int64_t row,
                             int64_t block, float *attended) {
  const Generator *g = m->generator;
  const uint8_t *codes = (uint8_t *)w->codes.at + row * m->levels;
  int64_t inner = g->heads * g->head_width, first = 1, number = w->first_token + row;
  const float *tokens[CODES];
  if (!block) {
    tokens[0] = g->tokens;
    for (int64_t l = 0; l < level; first += m->sizes[l], l++)
      tokens[l + 1] = g->tokens + (first + codes[l]) * 3 * inner;
  }
  for (int64_t t = level; block && t >= 0; number = ((int64_t *)w->parents.at)[number], t--)
    tokens[t] = (float *)w->tokens.at + (number * (g->blocks - 1) + block - 1) * padded(3 * inner);
  memset(attended, 0, (size_t)inner * sizeof(float));
  for (int64_t h = 0; h < g->heads; h++) {
    int64_t offset = h * g->head_width;
    float shares[CODES];
    for (int64_t t = 0; t <= level; t++)
      shares[t] = dot(tokens[level] + offset, tokens[t] + inner + offset, g->head_width) +
                  g->distances[h * m->levels + level - t];
    float sum = exponentiate(shares, level + 1, find_largest(shares, level + 1));
    for (int64_t t = 0; t <= level; t++)
      add_scaled(attended + offset, shares[t] / sum, tokens[t] + 2 * inner + offset, g->head_width);
  }
}

/* Add the cross-attention of a token to the query's prefix vectors, in a block, to its hidden
   state;
   ``shares`` is memory for [prefixes]. */
static void attend_to_query(const Generator *g, const Work *w, int64_t block, float *hidden,
                            const float *normed, float *shares) {
  int64_t side = padded(g->width);
  for (int64_t h = 0; h < g->heads; h++) {
    const float *keys =
        (float *)w->keys_values.at + (2 * block * g->heads + h) * g->prefixes * side;
    const float *values = keys + g->heads * g->prefixes * side;
    for (int64_t p = 0; p < g->prefixes; p++) shares[p] = dot(normed, keys + p * side, g->width);
    float sum = exponentiate(shares, g->prefixes, find_largest(shares, g->prefixes));
    for (int64_t p = 0; p < g->prefixes; p++)
      add_scaled(hidden, shares[p] / sum, values + p * side, g->width);
  }
}

/* Compute the generator's logits of a level's codes after each row of the frontier. */
static int run_generator(const Model *m, Work *w, int64_t level) {
  const Generator *g = m->generator;
  int64_t inner = g->heads * g->head_width, side = padded(g->width), high = padded(g->feedforward),
          first = 1;
  int64_t stride = inner > high ? inner : high, size = padded(3 * inner), later = g->blocks - 1,
          rows = w->rows;
  if (!reserve(&w->hidden, rows * side, sizeof(float)) ||
      !reserve(&w->normed, rows * side, sizeof(float)) ||
      !reserve(&w->inner, rows * stride + g->prefixes, sizeof(float)) ||
      !reserve(&w->generated, rows * CODES, sizeof(float)) ||
      !reserve(&w->tokens, (w->first_token + rows) * later * size, sizeof(float)))
    return 0;
  float *hidden = w->hidden.at, *normed = w->normed.at, *between = w->inner.at;
  float *tokens = (float *)w->tokens.at + w->first_token * later * size;
  for (int64_t l = 0; l + 1 < level; l++) first += m->sizes[l];
  for (int64_t r = 0; r < rows; r++) {
    int64_t token = level ? first + ((uint8_t *)w->codes.at)[r * m->levels + level - 1] : 0;
    memcpy(hidden + r * side, g->embeddings + token * g->width, (size_t)g->width * sizeof(float));
  }
  for (int64_t b = 0; b <= later; b++) {
    if (b)
      matrix_product(g->token + b * g->width * size, g->width, 3 * inner, normed, side,
                     tokens + (b - 1) * size, later * size, rows);
    for (int64_t r = 0; r < rows; r++) attend_to_tokens(m, w, level, r, b, between + r * stride);
    matrix_product(g->token_out + b * inner * side, inner, g->width, between, stride, normed, side,
                   rows);
    for (int64_t r = 0; r < rows; r++) {
      add_scaled(hidden + r * side, 1, normed + r * side, g->width);
      normalize(g, hidden + r * side, normed + r * side);
      attend_to_query(g, w, b, hidden + r * side, normed + r * side, between);
      normalize(g, hidden + r * side, normed + r * side);
    }
    matrix_product(g->up + b * g->width * high, g->width, g->feedforward, normed, side, between,
                   stride, rows);
    for (int64_t i = 0; i < rows * stride; i++) between[i] = between[i] > 0 ? between[i] : 0;
    matrix_product(g->down + b * g->feedforward * side, g->feedforward, g->width, between, stride,
                   normed, side, rows);
    for (int64_t r = 0; r < rows; r++) {
      add_scaled(hidden + r * side, 1, normed + r * side, g->width);
      normalize(g, hidden + r * side, normed + r * side);
    }
  }
  const float *codes = g->codes;
  for (int64_t l = 0; l < level; l++) codes += padded(m->sizes[l]) * g->width;
  matrix_product(codes, g->width, m->sizes[level], normed, side, w->generated.at, CODES, rows);
  return 1;
}

/* Combine nearness and logits to log-probabilities:
   log softmax(scale * nearness + gate * logit + bias). */
static void combine_scores(const Model *m, int64_t level, const float *logits, float *scores) {
  const Generator *g = m->generator;
  float scale = g->scales[level], gate = g->gates[level], values[CODES];
  int64_t size = m->sizes[level];
  for (int64_t c = 0; c < size; c++)
    scores[c] = scale * scores[c] + gate * logits[c] + g->biases[level * CODES + c];
  memcpy(values, scores, (size_t)size * sizeof(float));
  float largest = find_largest(scores, size),
        total = largest + logf(exponentiate(values, size, largest));
  for (int64_t c = 0; c < size; c++) scores[c] -= total;
}

/* Score every code of a level after each row of the frontier. */
static int score_codes(const Model *m, Work *w, int64_t level, const float *query) {
  if (!reserve(&w->logits, w->rows * CODES, sizeof(float))) return 0;
  multiply_level(m, w, level, query);
  if (m->generator && ((level == 0 && !project_query(m, w, query)) || !run_generator(m, w, level)))
    return 0;
  for (int64_t r = 0; r < w->rows; r++) {
    float *scores = (float *)w->logits.at + r * CODES;
    const uint8_t *codes = (uint8_t *)w->codes.at + r * m->levels;
    if (!score_nearness(m, w, level, codes, query, scores)) return 0;
    if (m->generator) combine_scores(m, level, (float *)w->generated.at + r * CODES, scores);
  }
  return 1;
}

/* Children of prefixes

   A prefix is a range of rows [low, high) in the table of each part. The codes that follow it begin
   at low and at the starts of the level that are in (low, high). */

static inline int64_t count_before(const Part *part,
                                   int64_t row) { /* number of allowed rows before this one */
  int64_t word = row >> 6;
  return part->before[word] + __builtin_popcountll(part->words[word] & ((1ull << (row & 63)) - 1));
}

static inline int64_t count_rows(const Part *part, int64_t low, int64_t high) {
  return part->words ? count_before(part, high) - count_before(part, low) : high - low;
}

static int64_t first_above(const int32_t *values, int64_t count, int64_t limit) {
  int64_t low = 0;
  while (count > 0) {
    int64_t half = count / 2;
    if (values[low + half] < limit)
      low += half + 1, count -= half + 1;
    else
      count = half;
  }
  return low;
}

/* Choice of the best children

   Children are sorted by keys of 64 bits: the upper 32 ascend as scores descend, the lower 32 are
   the order of the children, so that equal scores keep their order. */

static inline uint64_t make_key(float score, int64_t order) {
  uint32_t bits;
  score += 0.0f; /* no negative zero */
  memcpy(&bits, &score, sizeof bits);
  bits = bits >> 31 ? bits : ~bits & 0x7fffffff;
  return (uint64_t)bits << 32 | (uint32_t)order;
}

static uint64_t pick_pivot(const uint64_t *keys, int64_t n) { /* the median of three */
  uint64_t a = keys[0], b = keys[n / 2], c = keys[n - 1], low = a < b ? a : b, high = a < b ? b : a;
  return c < low ? low : c > high ? high : c;
}

/* Move the keys below a pivot to the front; return their number. */
static int64_t partition(uint64_t *keys, int64_t n, uint64_t pivot) {
  int64_t smaller = 0;
  for (int64_t i = 0; i < n; i++) { /* without branches, which would be guessed wrong */
    uint64_t key = keys[i];
    keys[i] = keys[smaller];
    keys[smaller] = key;
    smaller += key < pivot;
  }
  return smaller;
}

/* Sort keys such that at least the first ``needed`` are in their places. */
static void sort_keys(uint64_t *keys, int64_t n, int64_t needed) {
  while (n > MAX_INSERTION_SORT && needed > 0) {
    int64_t smaller = partition(keys, n, pick_pivot(keys, n)), larger = n - smaller;
    if (smaller < larger) { /* the shorter side first, so that few calls are nested */
      sort_keys(keys, smaller, needed);
      keys += smaller, n = larger, needed -= smaller;
    } else {
      sort_keys(keys + smaller, larger, needed - smaller);
      n = smaller;
    }
  }
  for (int64_t i = 1; i < n && needed > 0; i++) {
    uint64_t key = keys[i];
    int64_t j = i;
    for (; j > 0 && keys[j - 1] > key; j--) keys[j] = keys[j - 1];
    keys[j] = key;
  }
}

/* Move the keys of the best possible children to the front: ``width`` of them, or more if all IDs
   below them fit the budget. The next key is that of the best child that is not chosen. Return the
   number of IDs below the chosen children.

   As in quickselect, the keys between ``chosen`` and ``end`` are partitioned again and again: the
   better ones are chosen together, or else the worse ones are dropped together. */
static int64_t choose_children(Work *w, const Request *request, int64_t budget) {
  const Child *children = w->children.at;
  int64_t chosen = 0, end = 0, below = 0;
  if (!reserve(&w->keys, w->num_children + 1, sizeof(uint64_t))) return NO_MEMORY;
  uint64_t *keys = w->keys.at;
  for (int64_t i = 0; i < w->num_children; i++) {
    keys[end] = make_key(children[i].total, i);
    end += children[i].total > -INFINITY;
  }
  keys[end] = make_key(-INFINITY, 0); /* after the worst */
  while (chosen < end) {              /* keys from ``end`` on are not chosen */
    int64_t n = end - chosen, sum = below;
    if (n <= MAX_INSERTION_SORT) {
      sort_keys(keys + chosen, n, n);
      for (; chosen < end; chosen++) {
        int64_t count = children[(uint32_t)keys[chosen]].count;
        if (chosen >= request->width && below + count > budget) break;
        below += count;
      }
      break;
    }
    int64_t better = chosen + partition(keys + chosen, n, pick_pivot(keys + chosen, n));
    for (int64_t i = chosen; i < better; i++) sum += children[(uint32_t)keys[i]].count;
    if (better <= request->width || sum <= budget)
      chosen = better, below = sum;
    else
      end = better;
  }
  w->num_keys = chosen;
  return below;
}

/* Put the chosen keys into the order of their children, whose rows are adjacent then. */
static void order_by_rows(Work *w) {
  const Child *children = w->children.at;
  uint64_t *keys = w->keys.at, last = 0;
  for (int64_t i = 0; i < w->num_keys; i++) last = keys[i] > last ? keys[i] : last;
  for (int64_t i = 0, n = 0; i < w->num_children; i++) {
    uint64_t key = make_key(children[i].total, i);
    if (n < w->num_keys) keys[n] = key;
    n += key <= last;
  }
}

/* Return the score that a child must reach to be chosen, whatever children follow: the score of the
   best child so far that is not chosen. */
static float find_least_total(Work *w, const Request *request, int64_t budget) {
  if (choose_children(w, request, budget) < 0) return -INFINITY;
  uint32_t bits = (uint32_t)(((uint64_t *)w->keys.at)[w->num_keys] >> 32);
  float score;
  bits = bits >> 31 ? bits : ~bits & 0x7fffffff;
  memcpy(&score, &bits, sizeof score);
  return score;
}

static inline void add_child(Work *w, int64_t row, int64_t code, int64_t count, float total,
                             const int32_t *span, int64_t num_parts) {
  int64_t n = w->num_children++;
  int32_t *spans = (int32_t *)w->spans.at + n * num_parts * 2;
  ((Child *)w->children.at)[n] = (Child){(int32_t)row, (int32_t)code, (int32_t)count, total};
  if (num_parts == 1)
    spans[0] = span[0], spans[1] = span[1];
  else
    memcpy(spans, span, (size_t)num_parts * 2 * sizeof(int32_t));
}

/* List the codes that continue each row of the frontier, by row, then by code, if they have allowed
   IDs. ``scores`` [rows][CODES] may be NULL. With scores and a single part, children that
   choose_children() would not take may be missing. */
static int list_children(const Model *m, int64_t level, const Request *request, const float *scores,
                         int64_t budget, Work *w) {
  int64_t num_parts = w->num_parts, span = num_parts * 2;
  w->num_children = 0;
  if (!reserve(&w->buckets, CODES * span, sizeof(int32_t))) return NO_MEMORY;
  int32_t *code_spans = w->buckets.at; /* [CODES][parts][2] */
  float lowest = -INFINITY;
  int64_t next_limit =
      num_parts == 1 ? 4 * CODES
                     : INT64_MAX; /* number of children after which the least total is updated */
  for (int64_t r = 0; r < w->rows; r++) {
    const int32_t *ranges = (int32_t *)w->ranges.at + r * span;
    const float *row_scores = scores ? scores + r * CODES : NULL;
    float total = ((float *)w->total.at)[r];
    int64_t counts[CODES];
    uint64_t seen[CODES / 64] = {0};
    if (lowest > -INFINITY) {
      int good = 0;
      for (int c = 0; c < CODES; c++) good |= total + row_scores[c] >= lowest;
      if (!good) continue;
    }
    if (!reserve(&w->children, w->num_children + CODES, sizeof(Child))) return NO_MEMORY;
    if (!reserve(&w->spans, (w->num_children + CODES) * span, sizeof(int32_t))) return NO_MEMORY;
    for (int64_t p = 0; p < num_parts; p++) {
      const Part *part = w->parts + p;
      const Table *table = part->table;
      int64_t low = ranges[2 * p], high = ranges[2 * p + 1], listed = 0;
      if (low >= high) continue;
      int64_t first = table->level_bounds[level], last = table->level_bounds[level + 1];
      int64_t branch = first + first_above(table->starts + first, last - first, low + 1);
      int code = table->ids[low * table->columns + level];
      for (;; branch++) {
        int64_t end = branch < last && table->starts[branch] < high ? table->starts[branch] : high;
        if (end <= low || code >= m->sizes[level] || listed++ >= CODES) return DAMAGED;
        float gained = row_scores ? total + row_scores[code] : 0;
        int64_t below = gained < lowest ? 0 : count_rows(part, low, end);
        if (below && (level || request->level0[code >> 3] >> (code & 7) & 1)) {
          int32_t both[2] = {(int32_t)low, (int32_t)end};
          if (num_parts == 1)
            add_child(w, r, code, below, gained, both, 1);
          else {
            int32_t *code_span = code_spans + code * span;
            if (!(seen[code >> 6] >> (code & 63) & 1)) {
              seen[code >> 6] |= 1ull << (code & 63);
              counts[code] = 0;
              memset(code_span, 0, (size_t)span * sizeof(int32_t));
            }
            code_span[2 * p] = both[0];
            code_span[2 * p + 1] = both[1];
            counts[code] += below;
          }
        }
        if (end == high) break;
        low = end;
        code = branch < table->num_start_codes ? table->start_codes[branch]
                                               : table->ids[low * table->columns + level];
      }
    }
    if (scores && w->num_children > next_limit) {
      lowest = find_least_total(w, request, budget);
      next_limit = 2 * w->num_children;
    }
    for (int code = 0; num_parts > 1 && code < CODES; code++)
      if (seen[code >> 6] >> (code & 63) & 1)
        add_child(w, r, code, counts[code], row_scores ? total + row_scores[code] : 0,
                  code_spans + code * span, num_parts);
  }
  return 1;
}

/* Make the chosen children the frontier. The buffers of both frontiers are swapped. */
static int extend_frontier(const Model *m, Work *w, int64_t num_parts, int64_t level) {
  int64_t n = w->num_keys, levels = m->levels, span = 2 * num_parts;
  if (!reserve(&w->next_codes, n * levels, 1) ||
      !reserve(&w->next_gained, n * levels, sizeof(float)) ||
      !reserve(&w->next_total, n, sizeof(float)) ||
      !reserve(&w->next_ranges, n * span, sizeof(int32_t)) ||
      !reserve(&w->parents, w->first_token + w->rows + n, sizeof(int64_t)))
    return 0;
  int64_t *parents = (int64_t *)w->parents.at + w->first_token + w->rows;
  for (int64_t i = 0; i < n; i++) {
    int64_t number = (uint32_t)((uint64_t *)w->keys.at)[i];
    const Child *child = (Child *)w->children.at + number;
    uint8_t *codes = (uint8_t *)w->next_codes.at + i * levels;
    float *gained = (float *)w->next_gained.at + i * levels;
    memcpy(codes, (uint8_t *)w->codes.at + child->row * levels, (size_t)level);
    memcpy(gained, (float *)w->gained.at + child->row * levels, (size_t)level * sizeof(float));
    codes[level] = (uint8_t)child->code;
    gained[level] = ((float *)w->logits.at)[child->row * CODES + child->code];
    ((float *)w->next_total.at)[i] = child->total;
    parents[i] = w->first_token + child->row;
    memcpy((int32_t *)w->next_ranges.at + i * span, (int32_t *)w->spans.at + number * span,
           (size_t)span * sizeof(int32_t));
  }
  swap(&w->codes, &w->next_codes);
  swap(&w->gained, &w->next_gained);
  swap(&w->total, &w->next_total);
  swap(&w->ranges, &w->next_ranges);
  w->first_token += w->rows;
  w->rows = n;
  return 1;
}

/* Find the beams of a query; return the number of levels that were decoded. */
static int64_t find_beams(const Model *m, const Request *request, const float *query, Work *w) {
  const Part *parts = w->parts;
  int64_t num_parts = w->num_parts;
  int64_t budget = request->candidates > request->width ? request->candidates : request->width;
  if (!reserve(&w->codes, m->levels, 1) || !reserve(&w->gained, m->levels, sizeof(float)) ||
      !reserve(&w->total, 1, sizeof(float)) ||
      !reserve(&w->ranges, 2 * num_parts, sizeof(int32_t)) ||
      !reserve(&w->parents, 1, sizeof(int64_t)))
    return NO_MEMORY;
  w->rows = 1;
  w->first_token = 0;
  *(int64_t *)w->parents.at = 0; /* the start token has no parent */
  *(float *)w->total.at = 0;
  double rows = 0;
  for (int64_t p = 0; p < num_parts; p++) {
    ((int32_t *)w->ranges.at)[2 * p] = 0;
    ((int32_t *)w->ranges.at)[2 * p + 1] = (int32_t)parts[p].table->rows;
    rows += parts[p].table->rows;
  }
  if (!reserve(&w->logits, CODES, sizeof(float))) return NO_MEMORY;
  int status = list_children(m, 0, request, NULL, budget, w);
  if (status < 0) return status;
  Child *children = w->children.at;
  w->below = 0;
  for (int64_t i = 0; i < w->num_children; i++) w->below += children[i].count;
  /* few allowed IDs are all ranked, without decoding: n^2 <= candidates * rows, as in beam.py */
  if (w->below <= budget || (double)w->below * w->below <= rows * request->candidates) {
    if (!reserve(&w->keys, w->num_children, sizeof(uint64_t))) return NO_MEMORY;
    for (int64_t i = 0; i < w->num_children; i++) ((uint64_t *)w->keys.at)[i] = (uint64_t)i;
    w->num_keys = w->num_children;
    return extend_frontier(m, w, num_parts, 0) ? 0 : NO_MEMORY;
  }
  for (int64_t level = 0;; level++) {
    if (!score_codes(m, w, level, query)) return NO_MEMORY;
    const float *scores = w->logits.at;
    for (int64_t i = 0; !level && i < w->num_children; i++)
      children[i].total = scores[children[i].code];
    status = level ? list_children(m, level, request, scores, budget, w) : 1;
    if (status < 0) return status;
    w->below = choose_children(w, request, budget);
    if (w->below < 0) return NO_MEMORY;
    if (w->below > budget)
      sort_keys(w->keys.at, w->num_keys, w->num_keys);
    else
      order_by_rows(w);
    if (!extend_frontier(m, w, num_parts, level)) return NO_MEMORY;
    if (w->below <= budget || level + 1 == m->levels) return level + 1;
  }
}

/* Ranking of the IDs under the beams

     score = sum over levels of q · (code vector) - half_norm_step * byte_1
             - density_step * (byte_2 - ZERO_DENSITY)

   where byte_1 and byte_2 follow the codes of an ID. Codes that all IDs under a beam share are
   summed once, in its base. */

static int add_items(const Part *part, int64_t number, const Leaf *leaf, int64_t limit, Work *w) {
  const Table *table = part->table;
  int64_t low = table->bucket_starts[leaf->row], high = table->bucket_starts[leaf->row + 1];
  if (low < 0 || low > high || high > table->num_items) return DAMAGED;
  for (int64_t position = low; position < high && w->num_hits < limit; position++) {
    int64_t item = table->items[position];
    if (item < 0 || item >= table->num_items) return DAMAGED;
    if (part->allowed && !part->allowed[item]) continue;
    if (!reserve(&w->hit_buffer, w->num_hits + 1, sizeof(Hit))) return NO_MEMORY;
    ((Hit *)w->hit_buffer.at)[w->num_hits++] =
        (Hit){number, item, leaf->row, leaf->beam, leaf->score, 0};
  }
  return 1;
}

/* Count the allowed items of an ID that has some, or of the rows up to ``end`` if all are allowed.
 */
static int64_t count_items(const Part *part, int64_t row, int64_t end) {
  const Table *table = part->table;
  int64_t low = table->bucket_starts[row], high = table->bucket_starts[end], count = 0;
  if (low < 0 || low > high || high > table->num_items) return DAMAGED;
  if (!part->allowed || high - low == 1) return high - low;
  for (int64_t position = low; position < high; position++) {
    int64_t item = table->items[position];
    if (item < 0 || item >= table->num_items) return DAMAGED;
    count += part->allowed[item];
  }
  return count;
}

/* The limit that scores must reach to be among the k best so far. */
typedef struct {
  float *scores; /* memory for LIMIT_SLACK + 2 k */
  int64_t k, count;
  float limit; /* at most the k-th best score; -INFINITY while there are fewer */
} Limit;

static float find_kth(float *x, int64_t n,
                      int64_t k) {    /* move the k best to the front; return the k-th */
  for (int64_t low = 0, high = n;;) { /* the k-th is at low .. high */
    float pivot = x[(low + high) / 2];
    int64_t better = low, equal;
    for (int64_t i = low; i < high; i++) { /* without branches, which would be guessed wrong */
      float score = x[i];
      x[i] = x[better];
      x[better] = score;
      better += score > pivot;
    }
    if (k <= better) {
      high = better;
      continue;
    }
    equal = better;
    for (int64_t i = better; i < high; i++) {
      float score = x[i];
      x[i] = x[equal];
      x[equal] = score;
      equal += !(score < pivot);
    }
    if (k <= equal) return pivot;
    low = equal;
  }
}

static void raise_limit(Limit *limit) {
  if (!limit->k || limit->count < limit->k) return;
  limit->limit = find_kth(limit->scores, limit->count, limit->k);
  limit->count = limit->k;
}

static inline __attribute__((always_inline)) float sum_codes(const float *tables,
                                                             const uint8_t *codes, const int n) {
  float sums[4] = {0};
  for (int l = 0; l < n; l++) sums[l & 3] += tables[l * CODES + codes[l]];
  return sums[0] + sums[1] + (sums[2] + sums[3]);
}

static inline float find_costs(const Request *request, const uint8_t *costs) {
  return request->half_norm_step * costs[0] + request->density_step * (costs[1] - ZERO_DENSITY);
}

/* Compute the products of the query and the code vectors of the last levels, both rounded to 16
   bits. Vectors of few dimensions are not rounded: exact products take little time, and many items
   may have scores within a millionth. */
static void multiply_codes(const Model *m, Work *w, int64_t first_level, const float *query) {
  if (m->dim <= MAX_EXACT_DIMENSIONS) {
    const float *vectors = m->vectors;
    for (int64_t l = 0; l < m->levels; vectors += m->sizes[l++] * m->dim)
      if (l >= first_level)
        multiply_rows(vectors, m->sizes[l], m->dim, query, (float *)w->products.at + l * CODES);
    return;
  }
  int64_t dim = m->dim, groups = (dim + GROUP_DIMENSIONS - 1) / GROUP_DIMENSIONS, code = 0;
  float step = round_query(query, dim, 128, w->short_query.at);
  Packed packed = pack_query(w->short_query.at, dim, 8, w->packed_query.at);
  const uint8_t *bytes = m->bytes;
  for (int64_t l = 0; l < m->levels; l++)
    for (int64_t c = 0, size = m->sizes[l]; c < size;
         c += BLOCK, bytes += 2 * BLOCK * groups * GROUP_DIMENSIONS) {
      int64_t n = size - c < BLOCK ? size - c : BLOCK;
      float values[BLOCK], *products = (float *)w->products.at + l * CODES + c;
      if (l >= first_level) multiply_block(bytes, groups, &packed, values);
      for (int64_t j = 0; j < n; j++, code++)
        if (l >= first_level) products[j] = values[j] * (m->steps[code] * step);
    }
}

/* A scan of the IDs under the beams. */
typedef struct {
  const Request *request;
  float *tables;          /* products of the scanned levels; NULL: all IDs are kept, unranked */
  int64_t shared, levels; /* first codes, whose products are in the base of a beam; all codes */
  Limit best;
  Work *work;
  int64_t columns; /* columns of IDs that have bytes; 0: rows are not screened */
  /* a score minus the base of its beam is at most sum + step * (sum over columns of bytes) */
  float step, sum;
  uint8_t bytes[MAX_ID_COLUMNS][CODES];
  int64_t part, count; /* of the rows that wait until there is a block; they have the same base */
  float base;
  int32_t rows[BLOCK], beams[BLOCK];
} Scan;

/* Screening: most of the BLOCK IDs of a block are dropped together, since an upper bound of their
   scores is below the limit. */
#ifdef __AVX512VBMI__

/* Round the products of codes, and the costs of an ID's bytes, up to bytes:

     value <= largest + step * (byte - 254), byte in 1 .. 255

   so that sum + step * (sum of bytes) is an upper bound of a score. Values that are too low for a
   byte get 1. */
static void make_tables(Scan *scan, int64_t levels) {
  float spread = 0, largest[MAX_ID_COLUMNS];
  scan->columns = levels + 2;
  for (int64_t l = 0; l < levels; l++) {
    const float *values = scan->tables + l * CODES;
    float smallest = values[0];
    largest[l] = values[0];
    for (int c = 1; c < CODES; c++) {
      largest[l] = values[c] > largest[l] ? values[c] : largest[l];
      smallest = values[c] < smallest ? values[c] : smallest;
    }
    if (largest[l] - smallest > spread) spread = largest[l] - smallest;
  }
  scan->step = spread > 0 ? spread / 250 : 1;
  scan->sum = 0;
  float scale = 1 / scan->step;
  for (int64_t l = 0; l < levels; l++) {
    const float *values = scan->tables + l * CODES;
    for (int c = 0; c < CODES; c++) {
      float byte = 254 - (largest[l] - values[c]) * scale;
      scan->bytes[l][c] = (uint8_t)((byte > 0 ? byte : 0) + 1);
    }
    scan->sum += largest[l] - 254 * scan->step;
  }
  for (int64_t l = 0; l < 2; l++) {
    float cost = l ? scan->request->density_step : scan->request->half_norm_step;
    for (int c = 0; c < CODES; c++) {
      float byte = 254 - cost * (float)c * scale;
      scan->bytes[levels + l][c] = (uint8_t)((byte > 0 ? byte : 0) + 1);
    }
    scan->sum -= 254 * scan->step;
  }
  scan->sum += scan->request->density_step * ZERO_DENSITY;
}

/* Return the bits of the rows, of BLOCK rows, whose scores may be above a limit. Sums of bytes are
   compared with (limit - sum) / step - 1; the 1 is for rounding. */
static inline __attribute__((always_inline)) uint64_t screen_block(const Scan *scan,
                                                                   const uint8_t *ids,
                                                                   int64_t columns,
                                                                   const int32_t *rows, float limit,
                                                                   const int n) {
  __m512i even[MAX_ID_COLUMNS], odd[MAX_ID_COLUMNS];
  float quotient = (limit - scan->sum) / scan->step - 1;
  if (!(quotient > 0)) return ~0ull;
#define ID(r) _mm_loadu_si128((const __m128i *)(ids + rows[r] * columns))
  for (int r = 0; r < 16;
       r++) /* four rows in each register; exchanging bytes four times makes columns of them */
    even[r] = _mm512_inserti32x4(
        _mm512_inserti32x4(_mm512_inserti32x4(_mm512_castsi128_si512(ID(r)), ID(r + 16), 1),
                           ID(r + 32), 2),
        ID(r + 48), 3);
#undef ID
#define EXCHANGE(from, to)                                      \
  for (int r = 0; r < 8; r++) {                                 \
    to[2 * r] = _mm512_unpacklo_epi8(from[r], from[r + 8]);     \
    to[2 * r + 1] = _mm512_unpackhi_epi8(from[r], from[r + 8]); \
  }
  EXCHANGE(even, odd)
  EXCHANGE(odd, even)
  EXCHANGE(even, odd)
  EXCHANGE(odd, even)
#undef EXCHANGE
  __m512i low = _mm512_setzero_si512(), high = low, bytes = _mm512_set1_epi16(255);
  for (int c = 0; c < n; c++) {
    const uint8_t *table = scan->bytes[c];
    __m512i first = _mm512_permutex2var_epi8(_mm512_loadu_si512(table), even[c],
                                             _mm512_loadu_si512(table + 64));
    __m512i last = _mm512_permutex2var_epi8(_mm512_loadu_si512(table + 128), even[c],
                                            _mm512_loadu_si512(table + 192));
    __m512i value = _mm512_mask_blend_epi8(_mm512_movepi8_mask(even[c]), first, last);
    low = _mm512_add_epi16(low, _mm512_and_si512(value, bytes));
    high = _mm512_add_epi16(high, _mm512_srli_epi16(value, 8));
  }
  __m512i least = _mm512_set1_epi16(quotient < 32767 ? (int16_t)quotient : 32767);
  return _pdep_u64(_mm512_cmpge_epi16_mask(low, least), 0x5555555555555555) |
         _pdep_u64(_mm512_cmpge_epi16_mask(high, least), 0xaaaaaaaaaaaaaaaa);
}
#else

static void make_tables(
    Scan *scan, int64_t levels) { /* the costs of an ID's bytes, after the products of its codes */
  float *costs = scan->tables + levels * CODES;
  scan->columns = levels + 2;
  for (int c = 0; c < CODES; c++) {
    costs[c] = -scan->request->half_norm_step * (float)c;
    costs[CODES + c] = -scan->request->density_step * (float)(c - ZERO_DENSITY);
  }
}

static inline __attribute__((always_inline)) uint64_t screen_block(const Scan *scan,
                                                                   const uint8_t *ids,
                                                                   int64_t columns,
                                                                   const int32_t *rows, float limit,
                                                                   const int n) {
  float scores[BLOCK];
  uint64_t good = 0;
  for (int r = 0; r < BLOCK; r++) {
    uint64_t halves[2];
    float sums[4] = {0};
    memcpy(halves, ids + rows[r] * columns, sizeof halves);
    for (int l = 0; l < n; l++)
      sums[l & 3] += scan->tables[l * CODES + (uint8_t)(halves[l >> 3] >> (l & 7) * 8)];
    scores[r] = sums[0] + sums[1] + (sums[2] + sums[3]);
  }
  for (int r = 0; r < BLOCK; r++) good |= (uint64_t)(scores[r] >= limit) << r;
  return good;
}
#endif

static inline __attribute__((always_inline)) int scan_id(Scan *scan, const Part *part, float base,
                                                         int64_t number, int64_t row, int64_t beam,
                                                         const int n) {
  const Table *table = part->table;
  const uint8_t *id = table->ids + row * table->columns;
  float score = 0;
  if (scan->tables) {
    score = base + sum_codes(scan->tables, id + scan->shared, n);
    if (table->columns > scan->levels) score -= find_costs(scan->request, id + scan->levels);
    if (score < scan->best.limit) return 1;
    if (score > scan->best.limit) {
      scan->best.scores[scan->best.count++] = score;
      if (scan->best.count == LIMIT_SLACK + 2 * scan->best.k) raise_limit(&scan->best);
    }
  }
  Work *w = scan->work;
  if (!reserve(&w->leaves, w->num_leaves + 1, sizeof(Leaf))) return NO_MEMORY;
  ((Leaf *)w->leaves.at)[w->num_leaves++] =
      (Leaf){(int32_t)number, (int32_t)row, (int32_t)beam, score};
  return 1;
}

/* Score the rows that wait, if screening does not drop them. */
static inline __attribute__((always_inline)) int scan_block(Scan *scan, const int n) {
  const Part *part = scan->work->parts + scan->part;
  int64_t count = scan->count;
  uint64_t good = count < BLOCK ? (1ull << count) - 1 : ~0ull;
  const Table *table = part->table;
  int32_t last = 0;
  for (int64_t i = 0; i < count; i++) last = scan->rows[i] > last ? scan->rows[i] : last;
  if (scan->columns == table->columns - scan->shared && count > MIN_SCREENED_ROWS &&
      (last + 1) * table->columns + MAX_ID_COLUMNS <=
          table->rows * table->columns) { /* nothing after the table is read */
    for (int64_t i = count; i < BLOCK; i++) scan->rows[i] = last;
    good &= screen_block(scan, table->ids + scan->shared, table->columns, scan->rows,
                         scan->best.limit - scan->base, n + 2);
  }
  scan->count = 0;
  for (; good; good &= good - 1) {
    int i = __builtin_ctzll(good);
    if (scan_id(scan, part, scan->base, scan->part, scan->rows[i], scan->beams[i], n) < 0)
      return NO_MEMORY;
  }
  return 1;
}

/* Scan the IDs of a part under a beam; up to BLOCK - 1 of them wait for further ones. Count items.
 */
static inline __attribute__((always_inline)) int scan_range(Scan *scan, int64_t number,
                                                            int64_t beam, float base, const int n) {
  Work *w = scan->work;
  const Part *part = w->parts + number;
  const int32_t *range = (int32_t *)w->ranges.at + (beam * w->num_parts + number) * 2;
  int64_t low = range[0], high = range[1];
  if (low >= high) return 1;
  if (scan->count && (scan->part != number || scan->base != base) && scan_block(scan, n) < 0)
    return NO_MEMORY;
  scan->part = number;
  scan->base = base;
  if (!part->words) {
    int64_t items = count_items(part, low, high);
    if (items < 0) return DAMAGED;
    w->touched += items;
    while (low < high) {
      int64_t size = high - low < BLOCK - scan->count ? high - low : BLOCK - scan->count;
      for (int64_t i = 0; i < size; i++) {
        scan->rows[scan->count + i] = (int32_t)(low + i);
        scan->beams[scan->count + i] = (int32_t)beam;
      }
      scan->count += size;
      low += size;
      if (scan->count == BLOCK && scan_block(scan, n) < 0) return NO_MEMORY;
    }
    return 1;
  }
  for (int64_t first = low & -64; first < high; first += 64) {
    int64_t last = first + 64 < part->table->rows ? first + 64 : part->table->rows;
    uint64_t bits = part->words[first >> 6];
    if (first < low) bits &= ~0ull << (low - first);
    if (high < first + 64) bits &= ~0ull >> (first + 64 - high);
    if (part->table->bucket_starts[last] - part->table->bucket_starts[first] ==
        last - first) { /* an item for each ID */
      w->touched += __builtin_popcountll(bits);
    } else {
      for (uint64_t remaining = bits; remaining; remaining &= remaining - 1) {
        int64_t row = first + __builtin_ctzll(remaining), items = count_items(part, row, row + 1);
        if (items < 0) return DAMAGED;
        w->touched += items;
      }
    }
    for (; bits; bits &= bits - 1) {
      scan->rows[scan->count] = (int32_t)(first + __builtin_ctzll(bits));
      scan->beams[scan->count] = (int32_t)beam;
      if (++scan->count == BLOCK && scan_block(scan, n) < 0) return NO_MEMORY;
    }
  }
  return 1;
}

/* Ranking by embeddings

   Whole embeddings (16 bits): score = factor * (q · embedding). Residuals of fewer bits:

     score = q · (vector of the ID) + scale * step * (rounded query · n)

   where n = 2 * stored - largest are odd integers, largest = 2^bits - 1, and step is the step of
   the rounded query. The density costs density_step * fade^3 * density, with fade = (1 - cosine) /
   fade_width between 0 and 1. */

/* Return rounded query · n = 2 * sum(stored * query) - largest * sum(query). Sums are taken modulo
   2^32, in which the result fits. */
static inline __attribute__((always_inline)) int32_t multiply_packed(const uint8_t *row,
                                                                     const Packed *p,
                                                                     const int bits) {
  uint32_t sum = 0;
  const int largest = (1 << bits) - 1;
#ifdef __AVX512VNNI__
  __m512i high = _mm512_setzero_si512(), low = high, mask = _mm512_set1_epi8((char)largest);
  for (int64_t i = 0; i < p->width; i += 64) {
    __mmask64 inside = p->width - i < 64 ? (1ull << (p->width - i)) - 1 : ~0ull;
    __m512i bytes = _mm512_maskz_loadu_epi8(inside, row + i);
    const int8_t *upper = p->upper + i, *lower = p->lower + i;
    for (int shift = 0; shift < 8; shift += bits, upper += p->stride, lower += p->stride) {
      __m512i numbers = _mm512_and_si512(_mm512_srl_epi16(bytes, _mm_cvtsi32_si128(shift)), mask);
      high = _mm512_dpbusd_epi32(high, numbers, _mm512_loadu_si512(upper));
      low = _mm512_dpbusd_epi32(low, numbers, _mm512_loadu_si512(lower));
    }
  }
  sum = ((uint32_t)_mm512_reduce_add_epi32(high) << 8) + (uint32_t)_mm512_reduce_add_epi32(low);
#else
  const int16_t *query = p->query;
  for (int shift = 0; shift < 8; shift += bits, query += p->stride)
    for (int64_t i = 0; i < p->width; i++)
      sum += (uint32_t)((int16_t)(row[i] >> shift & largest) * query[i]);
#endif
  return (int32_t)(2 * sum - (uint32_t)largest * (uint32_t)p->sum);
}

/* Return the product of the query and the vector of a hit's ID. */
static float multiply_hit_id(const Model *m, const Work *w, const Hit *hit) {
  const Table *table = w->parts[hit->part].table;
  const float *products = w->products.at;
  const uint8_t *id = table->ids + hit->row * table->columns;
  float sums[2] = {0};
  for (int64_t l = 0; l < m->levels; l++) sums[l & 1] += products[l * CODES + id[l]];
  return sums[0] + sums[1];
}

/* Return the query for residuals: without the directions in which items do not differ, and with the
   weight of each dimension, which corrects for rounding (Residuals in nn/spread.py). */
static const float *weigh_query(const Model *m, const Work *w, const float *query, int bits) {
  const float *weights = m->residual_weights + (bits == 1   ? 0
                                                : bits == 2 ? 1
                                                : bits == 4 ? 2
                                                            : 3) *
                                                   m->dim;
  float *weighed = w->weighed.at;
  memcpy(weighed, query, (size_t)m->dim * sizeof(float));
  for (int64_t n = 0; n < m->num_constant; n++) {
    const float *direction = m->constant + n * m->dim;
    add_scaled(weighed, -dot(direction, query, m->dim), direction, m->dim);
  }
  for (int64_t i = 0; i < m->dim; i++) weighed[i] *= weights[i];
  return weighed;
}

/* Score n hits by their embeddings; for residuals, without the part of the IDs' vectors. The query
   for whole embeddings is not scaled by ``factor`` yet. Four hits at a time. */
static void score_embeddings(const Model *m, const Request *request, const float *query,
                             float factor, const Hit *hits, int64_t n, float *scores, Work *w) {
  int bits = (int)request->compared_bits;
  int64_t size = (m->dim * bits + 7) / 8;
  if (bits < 16) query = weigh_query(m, w, query, bits);
  float step =
      bits < 16 ? round_query(query, m->dim, (float)((1 << bits) - 1), w->short_query.at) : 0;
  Packed packed =
      bits < 16 ? pack_query(w->short_query.at, m->dim, bits, w->packed_query.at) : (Packed){0};
  for (int64_t i = 0; i < n; i += 4) {
    const uint8_t *rows[4];
    int32_t sums[4];
    for (int64_t j = 0; j < 4; j++) {
      const Hit *hit = hits + (i + j < n ? i + j : i);
      rows[j] = (const uint8_t *)w->parts[hit->part].embeddings + hit->item * size;
      if (i + j + 8 < n) {
        const Part *part = w->parts + hit[8].part;
        const uint8_t *next = (const uint8_t *)part->embeddings + hit[8].item * size;
        for (int64_t byte = 0; byte < size; byte += 64) __builtin_prefetch(next + byte);
        if (part->scales) __builtin_prefetch(part->scales + hit[8].item);
      }
      if (bits == 1) sums[j] = multiply_packed(rows[j], &packed, 1);
      if (bits == 2) sums[j] = multiply_packed(rows[j], &packed, 2);
      if (bits == 4) sums[j] = multiply_packed(rows[j], &packed, 4);
      if (bits == 8) sums[j] = multiply_packed(rows[j], &packed, 8);
    }
    for (int64_t j = 0; j < 4 && i + j < n; j++) {
      const Hit *hit = hits + i + j;
      const Part *part = w->parts + hit->part;
      scores[i + j] = bits < 16 ? (float)sums[j] * step * half_to_float(part->scales[hit->item])
                                : multiply_row(rows[j], query, m->dim, 1) * factor;
    }
  }
}

/* Return the cost of an item's density; ``product`` is its product with the query before scaling.
 */
static inline float find_density_cost(const Request *request, const Part *part, int64_t item,
                                      float product) {
  if (!part->densities) return 0;
  float share = (1 - product) / request->fade_width;
  share = share < 0 ? 0 : share > 1 ? 1 : share;
  return request->compared_density_step * share * share * share *
         (float)(part->densities[item] - ZERO_DENSITY);
}

#include "cells.c"

/* Add to the product of a hit with its residual that with the codes' vectors, and subtract the cost
   of its density. */
static inline float complete_score(const Model *m, const Request *request, Work *w, const Hit *hit,
                                   float score, float factor) {
  const Part *part = w->parts + hit->part;
  if (request->compared_bits < 16)
    score += m->fine_codes ? hit->score * (.5f + (float)part->lengths[hit->item] / 200)
                           : multiply_hit_id(m, w, hit);
  return score - find_density_cost(request, part, hit->item, score / factor);
}

/* Replace the rounded scores of hits by exact ones, where they may be among the best k, and drop the
   other hits. ``limit`` is the least rounded score of such a hit. Return the number of hits left. */
static int64_t refine_scores(const CellScan *scan, Hit *hits, float *scores, const float *totals,
                             int64_t n, float limit) {
  int64_t left = 0;
  for (int64_t i = 0; i < n; i++) {
    if (totals[i] < limit) continue;
    hits[left] = hits[i];
    scores[left++] = scores[i];
  }
  multiply_hits(scan, hits, left);
  return left;
}

/* Replace the hits of a query, which begin at ``first``, by the best of them by embeddings.
   Residuals are compared with ``query``, in the space of the codes, whole embeddings with
   ``compared``. */
static int rank_by_embeddings(const Model *m, const Request *request, const float *query,
                              const float *compared, float factor, int64_t first,
                              const CellScan *scan, Work *w) {
  int64_t n = w->num_hits - first, k = request->compared_k < n ? request->compared_k : n;
  if (!reserve(&w->keys, n, sizeof(uint64_t)) || !reserve(&w->chosen, k, sizeof(Hit)) ||
      !reserve(&w->scores, 2 * n, sizeof(float)))
    return NO_MEMORY;
  Hit *hits = (Hit *)w->hit_buffer.at + first, *chosen = w->chosen.at;
  float *scores = w->scores.at, *totals = scores + n;
  uint64_t *keys = w->keys.at;
  int is_residual = request->compared_bits < 16;
  score_embeddings(m, request, is_residual ? query : compared, factor, hits, n, scores, w);
  for (int is_exact = !scan || !is_residual;; is_exact = 1) {
    for (int64_t i = 0; i < n; i++) {
      totals[i] = complete_score(m, request, w, hits + i, scores[i], factor);
      keys[i] = make_key(totals[i], i);
    }
    sort_keys(keys, n, k);
    if (is_exact || !k) break;
    float limit = totals[(uint32_t)keys[k - 1]] - rounding_error(scan);
    n = refine_scores(scan, hits, scores, totals, n, limit);
  }
  for (int64_t i = 0; i < k; i++) {
    chosen[i] = hits[(uint32_t)keys[i]];
    chosen[i].score = totals[(uint32_t)keys[i]];
  }
  memcpy(hits, chosen, (size_t)k * sizeof(Hit));
  w->num_hits = first + k;
  return 1;
}

/* Scan the IDs under all beams. */
static inline __attribute__((always_inline)) int scan_beams(Scan *scan, const int n) {
  enum { AHEAD = 16, LINE = 64 };
  Work *w = scan->work;
  const float *products = w->products.at;
  const int32_t *ranges = w->ranges.at;
  for (int64_t b = 0; b < w->rows; b++) {
    const uint8_t *codes = (uint8_t *)w->codes.at + b * scan->levels;
    float base = 0;
    for (int64_t l = 0; l < scan->shared && scan->request->k; l++)
      base += products[l * CODES + codes[l]];
    for (int64_t p = 0; p < w->num_parts; p++) {
      if (b + AHEAD < w->rows) {
        const Table *table = w->parts[p].table;
        const int32_t *next = ranges + ((b + AHEAD) * w->num_parts + p) * 2;
        int64_t size = next[1] - next[0] < BLOCK ? next[1] - next[0] : BLOCK;
        __builtin_prefetch(table->bucket_starts + next[0]);
        __builtin_prefetch(table->bucket_starts + next[1]);
        for (int64_t byte = 0; byte < size * table->columns; byte += LINE)
          __builtin_prefetch(table->ids + next[0] * table->columns + byte);
      }
      int status = scan_range(scan, p, b, base, n);
      if (status < 0) return status;
    }
  }
  return scan->count ? scan_block(scan, n) : 1;
}

/* Rank the items under the beams by codes. */
static int rank_by_codes(const Model *m, const Request *request, int64_t decoded,
                         const float *query, Work *w) {
  int64_t levels = m->levels, shared = decoded ? decoded : 1, ranges = w->rows * w->num_parts;
  w->num_leaves = 0;
  if (!reserve(&w->best, LIMIT_SLACK + 2 * request->k, sizeof(float))) return NO_MEMORY;
  Scan scan = {request, NULL, shared, levels, {w->best.at, request->k, 0, -INFINITY},
               w,       0,    0,      0,      {{0}},
               0,       0,    0,      {0},    {0}};
  if (request->k || (request->compared_k && request->compared_bits < 16))
    multiply_codes(m, w, decoded, query);
  if (request->k) {
    if (w->below < BLOCK * ranges)
      scan.shared = 1; /* so that a block has the IDs under several beams */
    scan.tables = (float *)w->products.at + scan.shared * CODES;
    if (levels - scan.shared + 2 <= MAX_ID_COLUMNS &&
        (scan.shared < shared || w->below > MIN_SCREENED_ROWS * ranges))
      make_tables(&scan, levels - scan.shared);
  }
  int status;
  switch (levels - scan.shared) { /* the compiler unrolls the sums for these numbers of levels */
#define CASE(n) \
  case n: status = scan_beams(&scan, n); break;
    CASE(4)
    CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
        default : status = scan_beams(&scan, (int)(levels - scan.shared));
  }
  if (status < 0) return status;
  raise_limit(&scan.best);
  const Leaf *leaves = w->leaves.at;
  int64_t n = 0, limit_of_hits = request->k ? w->num_hits + request->k : INT64_MAX;
  if (!reserve(&w->keys, w->num_leaves, sizeof(uint64_t))) return NO_MEMORY;
  uint64_t *keys = w->keys.at;
  for (int64_t i = 0; i < w->num_leaves; i++)
    if (!(leaves[i].score < scan.best.limit)) keys[n++] = make_key(leaves[i].score, i);
  if (request->k) sort_keys(keys, n, request->k);
  for (int64_t i = 0; i < n && w->num_hits < limit_of_hits; i++) {
    const Leaf *leaf = leaves + (uint32_t)keys[i];
    status = add_items(w->parts + leaf->part, leaf->part, leaf, limit_of_hits, w);
    if (status < 0) return status;
  }
  return 1;
}

/* Exported functions */

API int is_supported(void) {
#if defined(__AVX512F__)
  return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi") &&
         __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("bmi2") &&
         __builtin_cpu_supports("fma");
#elif defined(__AVX2__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return 1;
#endif
}

/* Codes of items: for each vector x, the sum of code vectors, one of each level, that is nearest to
   it

   For a path with the sum s, the error |x - s|^2 / 2 - |x|^2 / 2 grows by |e|^2 / 2 - x·e + s·e if
   the code vector e follows. Beam search keeps the paths with the smallest errors. */

static inline uint32_t mask_smaller(const float *x,
                                    float than) { /* bits of the first LANES numbers */
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(_mm512_loadu_ps(x), _mm512_set1_ps(than), _CMP_LT_OQ);
#elif defined(__AVX2__)
  return (uint32_t)_mm256_movemask_ps(
      _mm256_cmp_ps(_mm256_loadu_ps(x), _mm256_set1_ps(than), _CMP_LT_OQ));
#else
  uint32_t bits = 0;
  for (int lane = 0; lane < LANES; lane++) bits |= (uint32_t)(x[lane] < than) << lane;
  return bits;
#endif
}

/* Write the positions of the smallest of n numbers, and these numbers, in ascending order; of equal
   numbers the first is kept. Return their count: at most ``max_count``, without infinite numbers.
 */
static int64_t find_smallest(const float *x, int64_t n, int64_t max_count, int32_t *positions,
                             float *smallest) {
  int64_t count = 0;
  for (int64_t first = 0; first < n; first += LANES) {
    uint32_t bits = mask_smaller(x + first, count < max_count ? INFINITY : smallest[max_count - 1]);
    for (; bits; bits &= bits - 1) {
      int64_t position = first + __builtin_ctz(bits),
              slot = count < max_count ? count : max_count - 1;
      if (count == max_count && x[position] >= smallest[slot]) continue;
      for (; slot && smallest[slot - 1] > x[position]; slot--)
        smallest[slot] = smallest[slot - 1], positions[slot] = positions[slot - 1];
      smallest[slot] = x[position];
      positions[slot] = (int32_t)position;
      if (count < max_count) count++;
    }
  }
  return count;
}

/* Find codes[n][levels] by beam search. VECTORS_PER_BATCH vectors are processed together, so that
   the products of a level stay in the cache. Return 1, or NO_MEMORY.

   products[n][levels][CODES]: x·e of the vectors and the code vectors.
   halves[levels][CODES]: |e|^2 / 2 of code vectors, infinite where a level has no such code.
   crossed: for each level, f·e of the earlier levels' code vectors f and the level's code vectors
   e: [earlier levels][CODES][CODES]. */
API int nearest_sums(const float *products, const float *halves, const float *crossed, int64_t n,
                     int64_t levels, int64_t beam, uint8_t *codes) {
  float *sums = malloc((size_t)(VECTORS_PER_BATCH * beam * CODES + 2 * VECTORS_PER_BATCH * beam) *
                       sizeof(float));
  int32_t *positions = malloc((size_t)beam * sizeof(int32_t));
  uint8_t *paths = malloc((size_t)((VECTORS_PER_BATCH + 1) * beam * levels));
  int64_t widths[VECTORS_PER_BATCH];
  float *errors = sums + VECTORS_PER_BATCH * beam * CODES;
  uint8_t *longer = paths + VECTORS_PER_BATCH * beam * levels;
  for (int64_t start = 0; start < n && sums && positions && paths; start += VECTORS_PER_BATCH) {
    int64_t rows = n - start < VECTORS_PER_BATCH ? n - start : VECTORS_PER_BATCH;
    const float *earlier = crossed;
    for (int64_t i = 0; i < rows; i++) widths[i] = 1, errors[i * beam] = 0;
    for (int64_t level = 0; level < levels; level++) {
      for (int64_t i = 0; i < rows; i++)
        for (int64_t b = 0; b < widths[i]; b++) {
          const float *vector_products = products + ((start + i) * levels + level) * CODES,
                      *half = halves + level * CODES;
          const uint8_t *path = paths + (i * beam + b) * levels;
          for (int64_t c = 0; c < CODES; c += 4 * LANES) {
            vec sum[4];
            for (int v = 0; v < 4; v++)
              sum[v] = *(const vec *)(half + c + v * LANES) + errors[i * beam + b] -
                       *(const vec *)(vector_products + c + v * LANES);
            for (int64_t before = 0; before < level; before++) {
              const float *crossed_row = earlier + (before * CODES + path[before]) * CODES + c;
              for (int v = 0; v < 4; v++) sum[v] += *(const vec *)(crossed_row + v * LANES);
            }
            memcpy(sums + (i * beam + b) * CODES + c, sum, sizeof sum);
          }
        }
      earlier += level * CODES * CODES;
      for (int64_t i = 0; i < rows; i++) {
        uint8_t *beam_paths = paths + i * beam * levels;
        widths[i] = find_smallest(sums + i * beam * CODES, widths[i] * CODES, beam, positions,
                                  errors + i * beam);
        for (int64_t b = 0; b < widths[i]; b++) {
          memcpy(longer + b * levels, beam_paths + positions[b] / CODES * levels, (size_t)level);
          longer[b * levels + level] = (uint8_t)(positions[b] % CODES);
        }
        memcpy(beam_paths, longer, (size_t)(widths[i] * levels));
      }
    }
    for (int64_t i = 0; i < rows; i++)
      memcpy(codes + (start + i) * levels, paths + i * beam * levels, (size_t)levels);
  }
  int has_memory = sums && positions && paths;
  free(sums), free(positions), free(paths);
  return has_memory ? 1 : NO_MEMORY;
}

/* Add each vector of vectors[n][dim] to the row of sums[][dim] that its code names. */
API void sum_by_code(const float *vectors, const int64_t *codes, int64_t n, int64_t dim,
                     float *sums) {
  for (int64_t i = 0; i < n; i++)
    for (int64_t d = 0; d < dim; d++) sums[codes[i] * dim + d] += vectors[i * dim + d];
}

API Work *make_work(void) { return calloc(1, sizeof(Work)); }

/* Return whether the tables and embeddings of a request have the model's levels and dimensions.
   Other lengths and numbers were checked when the index was opened; rows and codes are checked
   again. */
static int matches_model(const Model *m, const Request *request, const Part *parts,
                         int64_t num_parts) {
  for (const Part *part = parts; part < parts + num_parts; part++) {
    int64_t costs = part->table->columns - m->levels;
    if (costs != 0 && costs != 2) return 0;
    int64_t bytes = (m->dim * request->compared_bits + 7) / 8 * part->table->num_items;
    if (request->compared_k && part->embedding_bytes != bytes) return 0;
    if (!m->fine_codes) continue;
    if (costs || !part->fine || !part->cell_starts) return 0;
    if (request->compared_k && request->compared_bits < 16 && !part->lengths) return 0;
  }
  return 1;
}

/* Search for queries[n][dim]; embeddings are compared with ``compared`` [n][dim]. The hits are in
   ``w`` until its next search. */
API int search(const Model *m, const Part *parts, int64_t num_parts, const Request *requests,
               const float *queries, const float *compared, int64_t n, Work *w) {
  int64_t levels = m->levels;
  w->num_parts = num_parts;
  w->num_hits = 0;
  if (!reserve(&w->products, (levels + 4) * CODES, sizeof(float)) ||
      !reserve(&w->scaled, m->dim, sizeof(float)) || !reserve(&w->weighed, m->dim, sizeof(float)) ||
      !reserve(&w->short_query, m->dim + 16, sizeof(int16_t)) ||
      !reserve(&w->packed_query, m->dim + 8 * BLOCK, 2 * sizeof(int16_t)) ||
      !reserve(&w->result_buffer, n, sizeof(Result)))
    return NO_MEMORY;
  memset(w->products.at, 0, (size_t)(levels + 2) * CODES * sizeof(float));
  Result *results = w->result_buffer.at;
  for (int64_t q = 0; q < n; q++, queries += m->dim) {
    int64_t before = w->num_hits;
    w->touched = 0;
    w->parts = parts + requests[q].first_part;
    if (!matches_model(m, requests + q, w->parts, num_parts)) return DAMAGED;
    float factor;
    int64_t decoded = 0;
    int status;
    const float *query = w->scaled.at;
    CellScan scan;
    if (m->fine_codes) {
      scan = (CellScan){.model = m, .request = requests + q, .work = w, .limit = NO_LIMIT};
      multiply_levels(m, w, queries);
      factor = standardize_products(m, requests + q, queries, w);
      status = rank_by_cells(&scan);
    } else {
      factor = standardize_query(m, requests + q, queries, w);
      decoded = find_beams(m, requests + q, query, w);
      if (decoded < 0) return (int)decoded;
      status = rank_by_codes(m, requests + q, decoded, query, w);
    }
    if (status > 0 && requests[q].compared_k)
      status = rank_by_embeddings(m, requests + q, query, compared + q * m->dim, factor, before,
                                  m->fine_codes ? &scan : NULL, w);
    else if (status > 0 && m->fine_codes)
      status = rank_hits(w, before, requests[q].k);
    if (status < 0) return status;
    if (m->fine_codes) finish_hits(w, before);
    for (int64_t i = before; i < w->num_hits; i++) ((Hit *)w->hit_buffer.at)[i].score /= factor;
    if (!reserve(&w->decoded_buffer, w->num_hits * levels, sizeof(float))) return NO_MEMORY;
    for (int64_t i = before; i < w->num_hits; i++) {
      float *log_probabilities = (float *)w->decoded_buffer.at + i * levels;
      for (int64_t l = 0; l < levels; l++) log_probabilities[l] = NAN;
      if (decoded)
        memcpy(log_probabilities,
               (float *)w->gained.at + ((Hit *)w->hit_buffer.at)[i].beam * levels,
               (size_t)decoded * sizeof(float));
    }
    results[q] = (Result){w->num_hits - before, w->touched};
  }
  w->hits = w->hit_buffer.at;
  w->decoded = w->decoded_buffer.at;
  w->results = results;
  return 1;
}
