/* Search of ID tables for one query: beam search by code vectors or by a generator, then ranking by codes.

   The plain search in search/beam.py and search/rank.py defines the results; tests compare the two. search/kernel.py
   fills the structures below, whose fields must be the same there. Nothing that is read from a table is trusted:
   rows out of range end the search with DAMAGED. Compiled by build.py, in variants for different processors. */

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

enum { BLOCK = 64, GROUP = 4, COLUMNS = 16, CODES = 256, SMALL = 24, FEW = 8, SOME = 32, TOGETHER = 128 };
enum { DAMAGED = -1, NO_MEMORY = -2 };
enum { FEW_DIMENSIONS = 64 };
enum { ZERO_DENSITY = 128 }; /* the byte of a density of 0 */

#ifdef __AVX512F__
enum { LANES = 16 };
#else
enum { LANES = 8 };
#endif
typedef float vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

typedef struct { /* an IdTable */
  const uint8_t *ids;
  const int32_t *starts;
  const int64_t *level_bounds;
  const uint8_t *start_codes; /* the codes at the first num_start_codes of starts */
  const int32_t *bucket_starts;
  const int32_t *items;
  int64_t columns, rows, num_items, num_start_codes;
} Table;

typedef struct { /* a table, and the items of it that may be returned */
  const Table *table;
  const uint64_t *words;  /* bit vector of the rows with such an item; NULL: all items may be returned */
  const int32_t *before;  /* number of these rows before each word */
  const uint8_t *allowed; /* 1 for each such item */
  const void *embeddings; /* of the items, if they are compared, as search/vectors.py stores them: [items][...] */
  const uint16_t *scales; /* of embeddings of less than 16 bits a number, in half precision */
  int64_t embedding_bytes; /* of all items */
  const uint8_t *densities; /* of the items; NULL: they cost nothing */
} Part;

typedef struct { /* a generator, as nn/packed.py arranges it; matrices are packed as for product() */
  int64_t width, feedforward, heads, head_width, prefixes, blocks;
  const float *prefix_weights, *prefix_biases; /* from a query to its prefix vectors: [prefixes][width] */
  const float *prefix_keys_values;             /* from a prefix vector to keys and values: [blocks][2][heads][head_width] */
  const float *prefix_sides;         /* from a head's keys or values to the tokens' space: [blocks][2][heads] */
  const float *tokens;     /* queries, keys and values of the start token and of all codes in the first block:
                              [tokens][3][heads][head_width] */
  const float *embeddings; /* of the same: [tokens][width] */
  const float *distances;  /* added to self-attention, by distance: [heads][levels] */
  const float *token, *token_out, *up, *down; /* [blocks]; token: to queries, keys and values */
  const float *codes;      /* from a hidden state to the codes' logits, level after level */
  const float *scales, *gates; /* of nearness and of these logits: [levels] */
  const float *biases;         /* added to both: [levels][CODES] */
} Generator;

typedef struct {
  int64_t levels, dim;
  int64_t gram_levels;  /* levels that gram covers */
  int64_t first_level;  /* the first level of semantic codes */
  int64_t num_constant; /* directions that have the same product with every item */
  const Generator *generator; /* NULL: codes are scored by nearness alone */
  const int32_t *sizes; /* codes of each level, at most CODES */
  const float *vectors; /* code vectors, level after level: [codes][dim] */
  const uint8_t *bytes; /* the same in 16 bits, to be multiplied with their steps; packed for multiply_block() */
  const float *steps;   /* [codes] */
  const float *halves;  /* weighted half squared norms: [levels][CODES] */
  const float *gram;    /* weighted inner products of the code vectors of these levels: [codes][gram_levels][CODES] */
  const float *residual_weights; /* of each dimension, with 1, 2, 4 and 8 bits: [4][dim] */
  const float *constant;         /* those directions: [num_constant][dim] */
  float norm_weight;             /* that weight */
} Model;

typedef struct { /* one query's */
  int64_t first_part; /* its parts among those of all queries */
  int64_t width;      /* beam width */
  int64_t candidates; /* finish once at most this many IDs (or width, if larger) lie under the beams */
  int64_t k;          /* number of hits; 0 lists all items under the beams, unranked */
  int64_t compared_k; /* number of hits by their embeddings among these; 0: embeddings are not compared */
  int64_t compared_bits; /* of a number of an embedding; less than 16: embeddings are residuals of the IDs' vectors */
  uint8_t level0[CODES / 8]; /* bit vector of the allowed codes at level 0 */
  float half_norm_step, density_step; /* costs of the two bytes after an ID's codes */
  float compared_density_step; /* cost of a density where embeddings are compared, for products up to 1 - fade_width */
  const float *usage; /* share of the items that the query may find, by their first semantic code: [CODES] */
  float reference;    /* spread of an item's products with these code vectors; see standardize_query() */
  float fade_width;   /* densities count less for products within this of 1 */
} Request;

typedef struct {
  int64_t part, item, row, beam;
  float score, unused;
} Hit;

typedef struct { /* one query's */
  int64_t num_hits;
  int64_t touched; /* items under the beams */
} Result;

typedef struct {
  int32_t row, code; /* row of the frontier, and the code that follows it */
  int32_t count;     /* allowed IDs below */
  float total;
} Child;

typedef struct { /* an ID under a beam */
  int32_t part, row, beam;
  float score;
} Leaf;

typedef struct {
  void *at;
  size_t bytes;
} Buffer;

typedef struct { /* the memory of a search, kept for the next one */
  const Hit *found;       /* hits of all queries, query after query */
  const float *decoded;   /* log-probabilities of the codes of each hit's beam: [hits][levels]; NaN: not decoded */
  const Result *results;  /* [queries] */
  const Part *parts;
  int64_t num_parts;
  Buffer hits, hits_decoded, all_results, chosen;
  Buffer codes, gained, total, ranges; /* the frontier: [rows][levels], [rows][levels], [rows], [rows][parts][2] */
  Buffer next_codes, next_gained, next_total, next_ranges;
  Buffer logits, generated;         /* [rows][CODES] */
  Buffer keys_values;               /* of a query's prefix vectors, in the tokens' space: [blocks][2][heads][prefixes][width] */
  Buffer tokens;                    /* of all frontiers so far, as in Generator, in the later blocks: [tokens][blocks - 1] */
  Buffer parents;                   /* the token before each of them */
  Buffer hidden, normed, inner;     /* the generator's: one row for each of the frontier */
  Buffer children, spans, buckets;  /* spans: [children][parts][2] */
  Buffer keys, kept, best;
  Buffer products;                  /* of the query and code vectors: [levels][CODES]; then the costs of an ID's bytes */
  Buffer scaled, weighed;           /* the query, scaled; and as residuals are compared with it */
  Buffer short_query, packed_query; /* the query in 16 bits, and as integers are multiplied with it */
  Buffer scores;                    /* of hits by their embeddings */
  int64_t rows, below, num_children, num_keys, num_kept, num_hits, touched;
  int64_t first_token; /* the frontier's */
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

static void swap(Buffer *one, Buffer *other) {
  Buffer kept = *one;
  *one = *other;
  *other = kept;
}

/* Matrix products. Weights lie in blocks of BLOCK outputs: [block][in][BLOCK]. */

static inline __attribute__((always_inline)) void block_product(const float *weights, int64_t in, const float *x,
                                                                 int64_t stride, float *y, int64_t y_stride,
                                                                 const int inputs, const int vectors) {
  for (int first = 0; first < BLOCK; first += vectors * LANES) {
    vec sums[8] = {0};
    const float *w = weights + first;
    for (int64_t i = 0; i < in; i++, w += BLOCK)
      for (int q = 0; q < inputs; q++)
        for (int v = 0; v < vectors; v++) sums[q * vectors + v] += *(const vec *)(w + v * LANES) * x[q * stride + i];
    for (int q = 0; q < inputs; q++)
      for (int v = 0; v < vectors; v++) *(vec *)(y + q * y_stride + first + v * LANES) = sums[q * vectors + v];
  }
}

/* y[n][out] = x[n][in] times weights; four inputs at a time share what is read of the weights. */
static void product(const float *weights, int64_t in, int64_t out, const float *x, int64_t stride, float *y,
                    int64_t y_stride, int64_t n) {
  for (int64_t o = 0; o < out; o += BLOCK, weights += in * BLOCK, y += BLOCK) {
    int64_t q = 0;
    for (; q + 4 <= n; q += 4) block_product(weights, in, x + q * stride, stride, y + q * y_stride, y_stride, 4, 2);
    for (; q < n; q++)
      block_product(weights, in, x + q * stride, stride, y + q * y_stride, y_stride, 1, BLOCK / LANES);
  }
}

static inline int64_t padded(int64_t size) { return (size + BLOCK - 1) / BLOCK * BLOCK; }

/* Inner products with rows of numbers */

static inline float sum_lanes(vec x) {
#ifdef __AVX512F__
  return _mm512_reduce_add_ps((__m512)x);
#else
  float sum = 0;
  for (int lane = 0; lane < LANES; lane++) sum += x[lane];
  return sum;
#endif
}

/* Numbers in half precision; infinity becomes 65536. */

static inline float widen(uint16_t half) {
  uint32_t bits = (uint32_t)(half & 0x8000) << 16 | (uint32_t)(half & 0x7fff) << 13;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value * 0x1p112f;
}

static inline vec widen_some(const uint16_t *halves) { /* as many as there are lanes */
  typedef int16_t shorts __attribute__((vector_size(LANES * 2)));
  typedef int32_t ints __attribute__((vector_size(LANES * 4)));
  typedef uint32_t words __attribute__((vector_size(LANES * 4)));
  shorts narrow;
  memcpy(&narrow, halves, sizeof narrow);
  return (vec)((words)__builtin_convertvector(narrow, ints) << 13 & 0x8fffffff) * 0x1p112f;
}

static inline __attribute__((always_inline)) float multiply_row(const void *row, const float *y, int64_t n,
                                                                const int is_half) {
  const uint16_t *halves = row;
  const float *x = row;
  vec sums[4] = {0};
  int64_t i = 0;
  for (; i + 4 * LANES <= n; i += 4 * LANES)
    for (int j = 0, at = (int)i; j < 4; j++, at += LANES)
      sums[j] += (is_half ? widen_some(halves + at) : *(const vec *)(x + at)) * *(const vec *)(y + at);
  for (; i + LANES <= n; i += LANES)
    sums[0] += (is_half ? widen_some(halves + i) : *(const vec *)(x + i)) * *(const vec *)(y + i);
  float sum = sum_lanes(sums[0] + sums[1] + (sums[2] + sums[3]));
  for (; i < n; i++) sum += (is_half ? widen(halves[i]) : x[i]) * y[i];
  return sum;
}

static float dot(const float *x, const float *y, int64_t n) { return multiply_row(x, y, n, 0); }

static void add_scaled(float *x, float scale, const float *y, int64_t n) {
  for (int64_t i = 0; i < n; i++) x[i] += scale * y[i];
}

/* Four rows at a time share what is read of the other side. */
static void multiply_rows(const float *rows, int64_t n, int64_t dim, const float *x, float *y) {
  int64_t r = 0;
  for (; r + 4 <= n; r += 4, rows += 4 * dim) {
    vec sums[4] = {0};
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES)
      for (int j = 0; j < 4; j++) sums[j] += *(const vec *)(rows + j * dim + i) * *(const vec *)(x + i);
    for (int j = 0; j < 4; j++) {
      float sum = sum_lanes(sums[j]);
      for (int64_t rest = i; rest < dim; rest++) sum += rows[j * dim + rest] * x[rest];
      y[r + j] = sum;
    }
  }
  for (; r < n; r++, rows += dim) y[r] = dot(rows, x, dim);
}

/* Round a query to 16 bits, such that its products with rows of integers up to ``most`` fit into 32; return the size of a
   step, a power of two, with which small integers are exact. */
static float shorten(const float *query, int64_t dim, float most, int16_t *rounded) {
  float largest = 0, norm = sqrtf(dot(query, query, dim));
  for (int64_t i = 0; i < dim; i++) largest = fabsf(query[i]) > largest ? fabsf(query[i]) : largest;
  float step = largest / 32512, coarse = norm * sqrtf((float)dim) * (most / 2e9f);
  if (coarse > step) step = coarse;
  if (step > 0) step = exp2f(ceilf(log2f(step)));
  for (int64_t i = 0; i < dim; i++) rounded[i] = step > 0 ? (int16_t)lrintf(query[i] / step) : 0;
  return step;
}

/* A query as packed rows of integers are multiplied with it: for each position of a number in a byte, the dimensions whose
   numbers lie there, and zeros up to ``stride``. */
typedef struct {
  int64_t width, stride; /* bytes of a row, and of these rounded up to BLOCK */
  const int16_t *query;
  const int8_t *upper, *lower;            /* its two parts of 8 bits */
  int32_t sum, sum_of_upper, sum_of_lower; /* sums are taken modulo 2^32, in which the products fit */
} Packed;

static Packed pack_query(const int16_t *rounded, int64_t dim, int bits, int16_t *memory) {
  int64_t width = (dim * bits + 7) / 8, stride = padded(width), size = stride * (8 / bits);
  int8_t *upper = (int8_t *)(memory + size), *lower = upper + size;
  int32_t sum_of_upper = 0, sum_of_lower = 0;
  memset(memory, 0, (size_t)size * sizeof(int16_t));
  for (int64_t i = 0, first = 0; first < dim; i += stride, first += width)
    memcpy(memory + i, rounded + first, (size_t)(dim - first < width ? dim - first : width) * sizeof(int16_t));
  for (int64_t i = 0; i < size; i++) {
    lower[i] = (int8_t)(memory[i] & 255);
    upper[i] = (int8_t)((memory[i] - lower[i]) / 256);
    sum_of_upper += upper[i];
    sum_of_lower += lower[i];
  }
  int32_t sum = (int32_t)(256 * (uint32_t)sum_of_upper + (uint32_t)sum_of_lower);
  return (Packed){width, stride, memory, upper, lower, sum, sum_of_upper, sum_of_lower};
}

/* Compute the products of a query and BLOCK code vectors in 16 bits. Their upper and lower bytes, each plus 128, lie GROUP
   dimensions after GROUP dimensions: [groups][2][BLOCK][GROUP]. */
static inline void multiply_block(const uint8_t *bytes, int64_t groups, const Packed *p, float *products) {
  enum { PLANE = BLOCK * GROUP };
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
    memcpy(&upper, p->upper + g * GROUP, GROUP);
    memcpy(&lower, p->lower + g * GROUP, GROUP);
    __m512i x = _mm512_set1_epi32(upper), y = _mm512_set1_epi32(lower);
    for (int v = 0; v < WIDTH; v++) {
      __m512i own = _mm512_loadu_si512(bytes + v * 64), rest = _mm512_loadu_si512(bytes + PLANE + v * 64);
      high[v] = _mm512_dpbusd_epi32(high[v], own, x);
      middle[v] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(middle[v], own, y), rest, x);
      low[v] = _mm512_dpbusd_epi32(low[v], rest, y);
    }
  }
  for (int v = 0; v < WIDTH; v++)
    _mm512_storeu_ps(products + v * 16, 65536 * _mm512_cvtepi32_ps(high[v]) + 256 * _mm512_cvtepi32_ps(middle[v]) +
                                            _mm512_cvtepi32_ps(low[v]));
#elif defined(__AVX2__)
  enum { CHAINS = 4, PART = CHAINS * 4 }; /* codes at a time */
  __m256i offset = _mm256_set1_epi32((int32_t)(128 * (uint32_t)p->sum));
  for (int first = 0; first < BLOCK; first += PART) {
    __m256i sums[2][CHAINS] = {{{0}}};
    const uint8_t *codes = bytes + first * GROUP;
    for (int64_t g = 0; g < groups; g++, codes += 2 * PLANE) {
      int64_t four;
      memcpy(&four, p->query + g * GROUP, sizeof four);
      __m256i x = _mm256_set1_epi64x(four);
      for (int half = 0; half < 2; half++)
        for (int v = 0; v < CHAINS; v++) {
          __m256i own = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(codes + half * PLANE + v * 16)));
          sums[half][v] = _mm256_add_epi32(sums[half][v], _mm256_madd_epi16(x, own));
        }
    }
    for (int v = 0; v < CHAINS; v += 2) { /* two sums of each code lie side by side */
      __m256 parts[2];
      for (int half = 0; half < 2; half++) {
        __m256i own = _mm256_permute4x64_epi64(_mm256_hadd_epi32(sums[half][v], sums[half][v + 1]), 0xd8);
        parts[half] = _mm256_cvtepi32_ps(_mm256_sub_epi32(own, offset));
      }
      _mm256_storeu_ps(products + first + v * 4, 256 * parts[0] + parts[1]);
    }
  }
#else
  uint32_t sums[2][BLOCK] = {{0}}, offset = 128 * (uint32_t)p->sum;
  for (int64_t i = 0; i < 2 * groups; i++, bytes += PLANE) {
    const int16_t *query = p->query + i / 2 * GROUP;
    for (int c = 0; c < BLOCK; c++) {
      const uint8_t *codes = bytes + c * GROUP;
      sums[i & 1][c] +=
          (uint32_t)(codes[0] * query[0] + codes[1] * query[1] + codes[2] * query[2] + codes[3] * query[3]);
    }
  }
  for (int c = 0; c < BLOCK; c++)
    products[c] = 256 * (float)(int32_t)(sums[0][c] - offset) + (float)(int32_t)(sums[1][c] - offset);
#endif
}

/* Scores of codes */

/* Compute the products of a level's code vectors and the query, but those that standardize_query() has computed. */
static void multiply_level(const Model *m, Work *w, int64_t level, const float *query) {
  int64_t first = 0;
  if (level == m->first_level) return;
  for (int64_t l = 0; l < level; l++) first += m->sizes[l];
  multiply_rows(m->vectors + first * m->dim, m->sizes[level], m->dim, query, (float *)w->products.at + level * CODES);
}

/* Scale a query such that its products with the first code vectors of the items that it may find spread as those of such
   items do; return the factor. Costs are then in proportion to what the query tells the items apart by. */
static float standardize_query(const Model *m, const Request *request, const float *query, Work *w) {
  float *products = (float *)w->products.at + m->first_level * CODES, *scaled = w->scaled.at;
  const float *vectors = m->vectors;
  int64_t size = m->sizes[m->first_level];
  for (int64_t l = 0; l < m->first_level; l++) vectors += m->sizes[l] * m->dim;
  multiply_rows(vectors, size, m->dim, query, products);
  float mean = dot(request->usage, products, size), variance = 0;
  for (int64_t c = 0; c < size; c++) variance += request->usage[c] * (products[c] - mean) * (products[c] - mean);
  float factor = variance > 0 && request->reference > 0 ? request->reference / sqrtf(variance) : 1;
  for (int64_t c = 0; c < size; c++) products[c] *= factor;
  for (int64_t i = 0; i < m->dim; i++) scaled[i] = query[i] * factor;
  return factor;
}

/* Score every code of a level after a prefix by the nearness of the query: r·e − w|e|²/2 with r = q − w times the vectors
   of the prefix, and the weight w of norms. */
static int score_nearness(const Model *m, Work *w, int64_t level, const uint8_t *codes, const float *query,
                          float *scores) {
  const float *halves = m->halves + level * CODES, *products = (float *)w->products.at + level * CODES;
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

/* The generator */

static void normalize(const Generator *g, const float *x, float *y) { /* to unit length */
  float scale = 1 / sqrtf(dot(x, x, g->width) + (float)g->width * 1e-6f);
  for (int64_t i = 0; i < g->width; i++) y[i] = x[i] * scale;
}

static float find_largest(const float *x, int64_t n) {
  float largest[4] = {x[0], x[0], x[0], x[0]};
  for (int64_t i = 1; i < n; i++) largest[i & 3] = x[i] > largest[i & 3] ? x[i] : largest[i & 3];
  for (int lane = 1; lane < 4; lane++) largest[0] = largest[lane] > largest[0] ? largest[lane] : largest[0];
  return largest[0];
}

/* Replace values by their exponentials, relative to the largest value; return their sum. */
static float exponentials(float *x, int64_t n, float largest) {
  float sum = 0;
  for (int64_t i = 0; i < n; i++) { /* 2^k e^r with |r| at most ln(2) / 2, and a polynomial for e^r */
    float value = x[i] - largest > -87 ? x[i] - largest : -87;
    int32_t k = (int32_t)(value * 1.44269504f - 0.5f), bits = (k + 127) << 23;
    float rest = value - (float)k * 0.693359375f + (float)k * 2.12194440e-4f, power;
    float p = 1.9875691500e-4f;
    p = p * rest + 1.3981999507e-3f;
    p = p * rest + 8.3334519073e-3f;
    p = p * rest + 4.1665795894e-2f;
    p = p * rest + 1.6666665459e-1f;
    p = p * rest + 5.0000001201e-1f;
    memcpy(&power, &bits, sizeof power);
    x[i] = (p * rest * rest + rest + 1) * power;
  }
  for (int64_t i = 0; i < n; i++) sum += x[i];
  return sum;
}

/* Compute the keys and values of the prefix vectors of a query, at unit length. */
static int read_query(const Model *m, Work *w, const float *query) {
  const Generator *g = m->generator;
  int64_t heads = 2 * g->heads * g->blocks, width = g->width, stride = padded(heads * g->head_width);
  int64_t side = padded(width), size = padded(g->prefixes * width);
  if (!reserve(&w->keys_values, (heads * g->prefixes + 1) * side, sizeof(float)) ||
      !reserve(&w->inner, size + g->prefixes * stride, sizeof(float)))
    return 0;
  float *vectors = w->inner.at, *projected = vectors + size, *sides = w->keys_values.at;
  product(g->prefix_weights, m->dim, g->prefixes * width, query, 0, vectors, 0, 1);
  float length = sqrtf(dot(query, query, m->dim));
  for (int64_t i = 0; i < g->prefixes * width; i++)
    vectors[i] = vectors[i] / (length > 0 ? length : 1) + g->prefix_biases[i];
  for (int64_t p = 0; p < g->prefixes; p++) normalize(g, vectors + p * width, vectors + p * width);
  product(g->prefix_keys_values, width, stride, vectors, width, projected, stride, g->prefixes);
  for (int64_t h = 0; h < heads; h++)
    product(g->prefix_sides + h * g->head_width * side, g->head_width, width, projected + h * g->head_width, stride,
            sides + h * g->prefixes * side, side, g->prefixes);
  return 1;
}

/* Self-attention of the last of a row's tokens to all of them, in a block. In the first one, their queries, keys and
   values depend on nothing else. */
static void attend_to_tokens(const Model *m, const Work *w, int64_t level, int64_t row, int64_t block, float *attended) {
  const Generator *g = m->generator;
  const uint8_t *codes = (uint8_t *)w->codes.at + row * m->levels;
  int64_t inner = g->heads * g->head_width, first = 1, number = w->first_token + row;
  const float *tokens[CODES];
  if (!block) {
    tokens[0] = g->tokens;
    for (int64_t l = 0; l < level; first += m->sizes[l], l++) tokens[l + 1] = g->tokens + (first + codes[l]) * 3 * inner;
  }
  for (int64_t t = level; block && t >= 0; number = ((int64_t *)w->parents.at)[number], t--)
    tokens[t] = (float *)w->tokens.at + (number * (g->blocks - 1) + block - 1) * padded(3 * inner);
  memset(attended, 0, (size_t)inner * sizeof(float));
  for (int64_t h = 0; h < g->heads; h++) {
    int64_t place = h * g->head_width;
    float shares[CODES];
    for (int64_t t = 0; t <= level; t++)
      shares[t] = dot(tokens[level] + place, tokens[t] + inner + place, g->head_width) +
                  g->distances[h * m->levels + level - t];
    float sum = exponentials(shares, level + 1, find_largest(shares, level + 1));
    for (int64_t t = 0; t <= level; t++)
      add_scaled(attended + place, shares[t] / sum, tokens[t] + 2 * inner + place, g->head_width);
  }
}

/* Cross-attention of a token to the query's prefix vectors in a block, which leaves their ``shares`` [prefixes]. */
static void attend_to_query(const Generator *g, const Work *w, int64_t block, float *hidden, const float *normed,
                            float *shares) {
  int64_t side = padded(g->width);
  for (int64_t h = 0; h < g->heads; h++) {
    const float *keys = (float *)w->keys_values.at + (2 * block * g->heads + h) * g->prefixes * side;
    const float *values = keys + g->heads * g->prefixes * side;
    for (int64_t p = 0; p < g->prefixes; p++) shares[p] = dot(normed, keys + p * side, g->width);
    float sum = exponentials(shares, g->prefixes, find_largest(shares, g->prefixes));
    for (int64_t p = 0; p < g->prefixes; p++) add_scaled(hidden, shares[p] / sum, values + p * side, g->width);
  }
}

/* Compute the generator's logits of a level's codes after each row of the frontier. */
static int generate(const Model *m, Work *w, int64_t level) {
  const Generator *g = m->generator;
  int64_t inner = g->heads * g->head_width, side = padded(g->width), high = padded(g->feedforward), first = 1;
  int64_t stride = inner > high ? inner : high, size = padded(3 * inner), later = g->blocks - 1, rows = w->rows;
  if (!reserve(&w->hidden, rows * side, sizeof(float)) || !reserve(&w->normed, rows * side, sizeof(float)) ||
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
      product(g->token + b * g->width * size, g->width, 3 * inner, normed, side, tokens + (b - 1) * size, later * size,
              rows);
    for (int64_t r = 0; r < rows; r++) attend_to_tokens(m, w, level, r, b, between + r * stride);
    product(g->token_out + b * inner * side, inner, g->width, between, stride, normed, side, rows);
    for (int64_t r = 0; r < rows; r++) {
      add_scaled(hidden + r * side, 1, normed + r * side, g->width);
      normalize(g, hidden + r * side, normed + r * side);
      attend_to_query(g, w, b, hidden + r * side, normed + r * side, between);
      normalize(g, hidden + r * side, normed + r * side);
    }
    product(g->up + b * g->width * high, g->width, g->feedforward, normed, side, between, stride, rows);
    for (int64_t i = 0; i < rows * stride; i++) between[i] = between[i] > 0 ? between[i] : 0;
    product(g->down + b * g->feedforward * side, g->feedforward, g->width, between, stride, normed, side, rows);
    for (int64_t r = 0; r < rows; r++) {
      add_scaled(hidden + r * side, 1, normed + r * side, g->width);
      normalize(g, hidden + r * side, normed + r * side);
    }
  }
  const float *codes = g->codes;
  for (int64_t l = 0; l < level; l++) codes += padded(m->sizes[l]) * g->width;
  product(codes, g->width, m->sizes[level], normed, side, w->generated.at, CODES, rows);
  return 1;
}

/* Combine nearness and logits to log-probabilities. */
static void combine(const Model *m, int64_t level, const float *logits, float *scores) {
  const Generator *g = m->generator;
  float scale = g->scales[level], gate = g->gates[level], values[CODES];
  int64_t size = m->sizes[level];
  for (int64_t c = 0; c < size; c++)
    scores[c] = scale * scores[c] + gate * logits[c] + g->biases[level * CODES + c];
  memcpy(values, scores, (size_t)size * sizeof(float));
  float largest = find_largest(scores, size), total = largest + logf(exponentials(values, size, largest));
  for (int64_t c = 0; c < size; c++) scores[c] -= total;
}

/* Score every code of a level after each row of the frontier. */
static int score_codes(const Model *m, Work *w, int64_t level, const float *query) {
  if (!reserve(&w->logits, w->rows * CODES, sizeof(float))) return 0;
  multiply_level(m, w, level, query);
  if (m->generator && ((level == 0 && !read_query(m, w, query)) || !generate(m, w, level))) return 0;
  for (int64_t r = 0; r < w->rows; r++) {
    float *scores = (float *)w->logits.at + r * CODES;
    const uint8_t *codes = (uint8_t *)w->codes.at + r * m->levels;
    if (!score_nearness(m, w, level, codes, query, scores)) return 0;
    if (m->generator) combine(m, level, (float *)w->generated.at + r * CODES, scores);
  }
  return 1;
}

/* Children of prefixes */

static inline int64_t rank_of(const Part *part, int64_t row) { /* number of allowed rows before this one */
  int64_t word = row >> 6;
  return part->before[word] + __builtin_popcountll(part->words[word] & ((1ull << (row & 63)) - 1));
}

static inline int64_t count_rows(const Part *part, int64_t low, int64_t high) {
  return part->words ? rank_of(part, high) - rank_of(part, low) : high - low;
}

static int64_t first_above(const int32_t *values, int64_t count, int64_t limit) {
  int64_t low = 0;
  while (count > 0) {
    int64_t half = count / 2;
    if (values[low + half] < limit) low += half + 1, count -= half + 1;
    else count = half;
  }
  return low;
}

/* Choice of the best children */

static inline uint64_t make_key(float score, int64_t order) { /* ascending keys: descending scores, then order */
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
  while (n > SMALL && needed > 0) {
    int64_t smaller = partition(keys, n, pick_pivot(keys, n)), left = n - smaller;
    if (smaller < left) { /* the shorter side first, so that few calls are nested */
      sort_keys(keys, smaller, needed);
      keys += smaller, n = left, needed -= smaller;
    } else {
      sort_keys(keys + smaller, left, needed - smaller);
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

/* Move the keys of the best possible children to the front: of as many as the beam is wide, or of more if all IDs below
   them fit the budget; the best of the others is the next. Returns the number of IDs below. */
static int64_t choose(Work *w, const Request *request, int64_t budget) {
  const Child *children = w->children.at;
  int64_t chosen = 0, end = 0, below = 0;
  if (!reserve(&w->keys, w->num_children + 1, sizeof(uint64_t))) return NO_MEMORY;
  uint64_t *keys = w->keys.at;
  for (int64_t i = 0; i < w->num_children; i++) {
    keys[end] = make_key(children[i].total, i);
    end += children[i].total > -INFINITY;
  }
  keys[end] = make_key(-INFINITY, 0); /* after the worst */
  while (chosen < end) { /* those from ``end`` on are left out */
    int64_t n = end - chosen, sum = below;
    if (n <= SMALL) {
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
    if (better <= request->width || sum <= budget) chosen = better, below = sum;
    else end = better;
  }
  w->num_keys = chosen;
  return below;
}

/* Put the chosen keys into the order of their children, whose rows then lie side by side. */
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

/* Return a score that a child must reach to be chosen, whatever other children are found: that of the best left out. */
static float find_floor(Work *w, const Request *request, int64_t budget) {
  if (choose(w, request, budget) < 0) return -INFINITY;
  uint32_t bits = (uint32_t)(((uint64_t *)w->keys.at)[w->num_keys] >> 32);
  float score;
  bits = bits >> 31 ? bits : ~bits & 0x7fffffff;
  memcpy(&score, &bits, sizeof score);
  return score;
}

static inline void add_child(Work *w, int64_t row, int64_t code, int64_t count, float total, const int32_t *span,
                             int64_t num_parts) {
  int64_t n = w->num_children++;
  int32_t *own = (int32_t *)w->spans.at + n * num_parts * 2;
  ((Child *)w->children.at)[n] = (Child){(int32_t)row, (int32_t)code, (int32_t)count, total};
  if (num_parts == 1) own[0] = span[0], own[1] = span[1];
  else memcpy(own, span, (size_t)num_parts * 2 * sizeof(int32_t));
}

/* List the codes that continue each row of the frontier: by row, then by code; only those with allowed IDs.
   ``scores`` [rows][CODES] may be NULL; with them, and one part, children may be missing that choose() would not take. */
static int list_children(const Model *m, int64_t level, const Request *request, const float *scores, int64_t budget, Work *w) {
  int64_t num_parts = w->num_parts, span = num_parts * 2;
  w->num_children = 0;
  if (!reserve(&w->buckets, CODES * span, sizeof(int32_t))) return NO_MEMORY;
  int32_t *found = w->buckets.at; /* [CODES][parts][2] */
  float lowest = -INFINITY;
  int64_t enough = num_parts == 1 ? 4 * CODES : INT64_MAX; /* children after which the first floor is found */
  for (int64_t r = 0; r < w->rows; r++) {
    const int32_t *ranges = (int32_t *)w->ranges.at + r * span;
    const float *own_scores = scores ? scores + r * CODES : NULL;
    float total = ((float *)w->total.at)[r];
    int64_t counts[CODES];
    uint64_t seen[CODES / 64] = {0};
    if (lowest > -INFINITY) {
      int good = 0;
      for (int c = 0; c < CODES; c++) good |= total + own_scores[c] >= lowest;
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
        float gained = own_scores ? total + own_scores[code] : 0;
        int64_t below = gained < lowest ? 0 : count_rows(part, low, end);
        if (below && (level || request->level0[code >> 3] >> (code & 7) & 1)) {
          int32_t both[2] = {(int32_t)low, (int32_t)end};
          if (num_parts == 1) add_child(w, r, code, below, gained, both, 1);
          else {
            int32_t *own = found + code * span;
            if (!(seen[code >> 6] >> (code & 63) & 1)) {
              seen[code >> 6] |= 1ull << (code & 63);
              counts[code] = 0;
              memset(own, 0, (size_t)span * sizeof(int32_t));
            }
            own[2 * p] = both[0];
            own[2 * p + 1] = both[1];
            counts[code] += below;
          }
        }
        if (end == high) break;
        low = end;
        code = branch < table->num_start_codes ? table->start_codes[branch] : table->ids[low * table->columns + level];
      }
    }
    if (scores && w->num_children > enough) {
      lowest = find_floor(w, request, budget);
      enough = 2 * w->num_children;
    }
    for (int code = 0; num_parts > 1 && code < CODES; code++)
      if (seen[code >> 6] >> (code & 63) & 1)
        add_child(w, r, code, counts[code], own_scores ? total + own_scores[code] : 0, found + code * span, num_parts);
  }
  return 1;
}

/* Make the chosen children the frontier. */
static int extend(const Model *m, Work *w, int64_t num_parts, int64_t level) {
  int64_t n = w->num_keys, levels = m->levels, span = 2 * num_parts;
  if (!reserve(&w->next_codes, n * levels, 1) || !reserve(&w->next_gained, n * levels, sizeof(float)) ||
      !reserve(&w->next_total, n, sizeof(float)) || !reserve(&w->next_ranges, n * span, sizeof(int32_t)) ||
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
      !reserve(&w->total, 1, sizeof(float)) || !reserve(&w->ranges, 2 * num_parts, sizeof(int32_t)) ||
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
  /* of few IDs none is left out, as in beam.py */
  if (w->below <= budget || (double)w->below * w->below <= rows * request->candidates) {
    if (!reserve(&w->keys, w->num_children, sizeof(uint64_t))) return NO_MEMORY;
    for (int64_t i = 0; i < w->num_children; i++) ((uint64_t *)w->keys.at)[i] = (uint64_t)i;
    w->num_keys = w->num_children;
    return extend(m, w, num_parts, 0) ? 0 : NO_MEMORY;
  }
  for (int64_t level = 0;; level++) {
    if (!score_codes(m, w, level, query)) return NO_MEMORY;
    const float *scores = w->logits.at;
    for (int64_t i = 0; !level && i < w->num_children; i++) children[i].total = scores[children[i].code];
    status = level ? list_children(m, level, request, scores, budget, w) : 1;
    if (status < 0) return status;
    w->below = choose(w, request, budget);
    if (w->below < 0) return NO_MEMORY;
    if (w->below > budget) sort_keys(w->keys.at, w->num_keys, w->num_keys);
    else order_by_rows(w);
    if (!extend(m, w, num_parts, level)) return NO_MEMORY;
    if (w->below <= budget || level + 1 == m->levels) return level + 1;
  }
}

/* Ranking of the IDs under the beams */

static int add_items(const Part *part, int64_t number, const Leaf *leaf, int64_t limit, Work *w) {
  const Table *table = part->table;
  int64_t low = table->bucket_starts[leaf->row], high = table->bucket_starts[leaf->row + 1];
  if (low < 0 || low > high || high > table->num_items) return DAMAGED;
  for (int64_t place = low; place < high && w->num_hits < limit; place++) {
    int64_t item = table->items[place];
    if (item < 0 || item >= table->num_items) return DAMAGED;
    if (part->allowed && !part->allowed[item]) continue;
    if (!reserve(&w->hits, w->num_hits + 1, sizeof(Hit))) return NO_MEMORY;
    ((Hit *)w->hits.at)[w->num_hits++] = (Hit){number, item, leaf->row, leaf->beam, leaf->score, 0};
  }
  return 1;
}

/* Count the allowed items of an ID that has some, or of the rows up to ``end`` if all are allowed. */
static int64_t count_items(const Part *part, int64_t row, int64_t end) {
  const Table *table = part->table;
  int64_t low = table->bucket_starts[row], high = table->bucket_starts[end], count = 0;
  if (low < 0 || low > high || high > table->num_items) return DAMAGED;
  if (!part->allowed || high - low == 1) return high - low;
  for (int64_t place = low; place < high; place++) {
    int64_t item = table->items[place];
    if (item < 0 || item >= table->num_items) return DAMAGED;
    count += part->allowed[item];
  }
  return count;
}

typedef struct { /* finds the k-th best of some scores */
  float *scores; /* memory for SOME + 2 k */
  int64_t k, count;
  float limit; /* at most the k-th best score; -INFINITY while there are fewer */
} Limit;

static float find_kth(float *x, int64_t n, int64_t k) { /* move the k best to the front; return the k-th */
  for (int64_t low = 0, high = n;;) { /* the k-th lies between these */
    float pivot = x[(low + high) / 2];
    int64_t better = low, equal;
    for (int64_t i = low; i < high; i++) { /* without branches, which would be guessed wrong */
      float own = x[i];
      x[i] = x[better];
      x[better] = own;
      better += own > pivot;
    }
    if (k <= better) {
      high = better;
      continue;
    }
    equal = better;
    for (int64_t i = better; i < high; i++) {
      float own = x[i];
      x[i] = x[equal];
      x[equal] = own;
      equal += !(own < pivot);
    }
    if (k <= equal) return pivot;
    low = equal;
  }
}

static void raise(Limit *limit) {
  if (!limit->k || limit->count < limit->k) return;
  limit->limit = find_kth(limit->scores, limit->count, limit->k);
  limit->count = limit->k;
}

static inline __attribute__((always_inline)) float sum_codes(const float *tables, const uint8_t *codes, const int n) {
  float sums[4] = {0};
  for (int l = 0; l < n; l++) sums[l & 3] += tables[l * CODES + codes[l]];
  return sums[0] + sums[1] + (sums[2] + sums[3]);
}

static inline float find_costs(const Request *request, const uint8_t *costs) {
  return request->half_norm_step * costs[0] + request->density_step * (costs[1] - ZERO_DENSITY);
}

/* Compute the products of the query and the code vectors of the last levels, both rounded to 16 bits. Of few dimensions
   they are not rounded: that takes little time, and there may be many items within a millionth. */
static void multiply_codes(const Model *m, Work *w, int64_t first_level, const float *query) {
  if (m->dim <= FEW_DIMENSIONS) {
    const float *vectors = m->vectors;
    for (int64_t l = 0; l < m->levels; vectors += m->sizes[l++] * m->dim)
      if (l >= first_level) multiply_rows(vectors, m->sizes[l], m->dim, query, (float *)w->products.at + l * CODES);
    return;
  }
  int64_t dim = m->dim, groups = (dim + GROUP - 1) / GROUP, code = 0;
  float step = shorten(query, dim, 128, w->short_query.at);
  Packed packed = pack_query(w->short_query.at, dim, 8, w->packed_query.at);
  const uint8_t *bytes = m->bytes;
  for (int64_t l = 0; l < m->levels; l++)
    for (int64_t c = 0, size = m->sizes[l]; c < size; c += BLOCK, bytes += 2 * BLOCK * groups * GROUP) {
      int64_t n = size - c < BLOCK ? size - c : BLOCK;
      float values[BLOCK], *products = (float *)w->products.at + l * CODES + c;
      if (l >= first_level) multiply_block(bytes, groups, &packed, values);
      for (int64_t j = 0; j < n; j++, code++)
        if (l >= first_level) products[j] = values[j] * (m->steps[code] * step);
    }
}

typedef struct { /* what a scan of the IDs under the beams needs of a query */
  const Request *request;
  float *tables; /* products of the levels that are scanned; NULL: IDs are kept as they are */
  int64_t shared, levels; /* codes whose products are in the base of a beam; all codes */
  Limit best;
  Work *work;
  int64_t columns; /* columns of a part's IDs that bytes are for; 0: none */
  float step, sum; /* a score, without what the beam shares, is at most sum + step * the sum of its bytes */
  uint8_t bytes[COLUMNS][CODES];
  int64_t part, count; /* of the rows that wait until they are a block; they have one base */
  float base;
  int32_t rows[BLOCK], beams[BLOCK];
} Scan;

/* Blocks of BLOCK IDs, most of which are dropped together: they are not among the best. */
#ifdef __AVX512VBMI__

/* Round the products and the costs of an ID's bytes up to bytes. Values that are too low for one become 0. */
static void make_tables(Scan *scan, int64_t levels) {
  float spread = 0, largest[COLUMNS];
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

/* Return which of BLOCK rows' IDs may have scores above a limit. */
static inline __attribute__((always_inline)) uint64_t find_good(const Scan *scan, const uint8_t *ids, int64_t columns,
                                                                 const int32_t *rows, float limit, const int n) {
  __m512i even[COLUMNS], odd[COLUMNS];
  float quotient = (limit - scan->sum) / scan->step - 1;
  if (!(quotient > 0)) return ~0ull;
#define ID(r) _mm_loadu_si128((const __m128i *)(ids + rows[r] * columns))
  for (int r = 0; r < 16; r++) /* four rows in each register, whose bytes are then exchanged until it has a column */
    even[r] = _mm512_inserti32x4(
        _mm512_inserti32x4(_mm512_inserti32x4(_mm512_castsi128_si512(ID(r)), ID(r + 16), 1), ID(r + 32), 2), ID(r + 48), 3);
#undef ID
#define EXCHANGE(from, to) \
  for (int r = 0; r < 8; r++) { \
    to[2 * r] = _mm512_unpacklo_epi8(from[r], from[r + 8]); \
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
    __m512i first = _mm512_permutex2var_epi8(_mm512_loadu_si512(table), even[c], _mm512_loadu_si512(table + 64));
    __m512i last = _mm512_permutex2var_epi8(_mm512_loadu_si512(table + 128), even[c], _mm512_loadu_si512(table + 192));
    __m512i value = _mm512_mask_blend_epi8(_mm512_movepi8_mask(even[c]), first, last);
    low = _mm512_add_epi16(low, _mm512_and_si512(value, bytes));
    high = _mm512_add_epi16(high, _mm512_srli_epi16(value, 8));
  }
  __m512i least = _mm512_set1_epi16(quotient < 32767 ? (int16_t)quotient : 32767);
  return _pdep_u64(_mm512_cmpge_epi16_mask(low, least), 0x5555555555555555) |
         _pdep_u64(_mm512_cmpge_epi16_mask(high, least), 0xaaaaaaaaaaaaaaaa);
}
#else

static void make_tables(Scan *scan, int64_t levels) { /* the costs of an ID's bytes, behind the products of its codes */
  float *costs = scan->tables + levels * CODES;
  scan->columns = levels + 2;
  for (int c = 0; c < CODES; c++) {
    costs[c] = -scan->request->half_norm_step * (float)c;
    costs[CODES + c] = -scan->request->density_step * (float)(c - ZERO_DENSITY);
  }
}

static inline __attribute__((always_inline)) uint64_t find_good(const Scan *scan, const uint8_t *ids, int64_t columns,
                                                                 const int32_t *rows, float limit, const int n) {
  float scores[BLOCK];
  uint64_t good = 0;
  for (int r = 0; r < BLOCK; r++) {
    uint64_t halves[2];
    float sums[4] = {0};
    memcpy(halves, ids + rows[r] * columns, sizeof halves);
    for (int l = 0; l < n; l++) sums[l & 3] += scan->tables[l * CODES + (uint8_t)(halves[l >> 3] >> (l & 7) * 8)];
    scores[r] = sums[0] + sums[1] + (sums[2] + sums[3]);
  }
  for (int r = 0; r < BLOCK; r++) good |= (uint64_t)(scores[r] >= limit) << r;
  return good;
}
#endif

static inline __attribute__((always_inline)) int scan_id(Scan *scan, const Part *part, float base, int64_t number,
                                                          int64_t row, int64_t beam, const int n) {
  const Table *table = part->table;
  const uint8_t *id = table->ids + row * table->columns;
  float score = 0;
  if (scan->tables) {
    score = base + sum_codes(scan->tables, id + scan->shared, n);
    if (table->columns > scan->levels) score -= find_costs(scan->request, id + scan->levels);
    if (score < scan->best.limit) return 1;
    if (score > scan->best.limit) {
      scan->best.scores[scan->best.count++] = score;
      if (scan->best.count == SOME + 2 * scan->best.k) raise(&scan->best);
    }
  }
  Work *w = scan->work;
  if (!reserve(&w->kept, w->num_kept + 1, sizeof(Leaf))) return NO_MEMORY;
  ((Leaf *)w->kept.at)[w->num_kept++] = (Leaf){(int32_t)number, (int32_t)row, (int32_t)beam, score};
  return 1;
}

/* Scan the rows that wait. */
static inline __attribute__((always_inline)) int scan_block(Scan *scan, const int n) {
  const Part *part = scan->work->parts + scan->part;
  int64_t count = scan->count;
  uint64_t good = count < BLOCK ? (1ull << count) - 1 : ~0ull;
  const Table *table = part->table;
  int32_t last = 0;
  for (int64_t i = 0; i < count; i++) last = scan->rows[i] > last ? scan->rows[i] : last;
  if (scan->columns == table->columns - scan->shared && count > FEW &&
      (last + 1) * table->columns + COLUMNS <= table->rows * table->columns) { /* nothing behind is read */
    for (int64_t i = count; i < BLOCK; i++) scan->rows[i] = last;
    good &= find_good(scan, table->ids + scan->shared, table->columns, scan->rows,
                      scan->best.limit - scan->base, n + 2);
  }
  scan->count = 0;
  for (; good; good &= good - 1) {
    int i = __builtin_ctzll(good);
    if (scan_id(scan, part, scan->base, scan->part, scan->rows[i], scan->beams[i], n) < 0) return NO_MEMORY;
  }
  return 1;
}

/* Scan the IDs of a part under a beam, or leave some waiting for more; count their items. */
static inline __attribute__((always_inline)) int scan_range(Scan *scan, int64_t number, int64_t beam, float base,
                                                             const int n) {
  Work *w = scan->work;
  const Part *part = w->parts + number;
  const int32_t *range = (int32_t *)w->ranges.at + (beam * w->num_parts + number) * 2;
  int64_t low = range[0], high = range[1];
  if (low >= high) return 1;
  if (scan->count && (scan->part != number || scan->base != base) && scan_block(scan, n) < 0) return NO_MEMORY;
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
    if (part->table->bucket_starts[last] - part->table->bucket_starts[first] == last - first) { /* an item for each ID */
      w->touched += __builtin_popcountll(bits);
    } else {
      for (uint64_t rest = bits; rest; rest &= rest - 1) {
        int64_t row = first + __builtin_ctzll(rest), items = count_items(part, row, row + 1);
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

/* Return the product of a query and the odd numbers of a residual. Sums are taken modulo 2^32, in which it fits. */
static inline __attribute__((always_inline)) int32_t multiply_packed(const uint8_t *row, const Packed *p, const int bits) {
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
    for (int64_t i = 0; i < p->width; i++) sum += (uint32_t)((int16_t)(row[i] >> shift & largest) * query[i]);
#endif
  return (int32_t)(2 * sum - (uint32_t)largest * (uint32_t)p->sum);
}

/* Return the product of the query and the vector of a hit's ID. */
static float multiply_id(const Model *m, const Work *w, const Hit *hit) {
  const Table *table = w->parts[hit->part].table;
  const float *products = w->products.at;
  const uint8_t *id = table->ids + hit->row * table->columns;
  float sums[2] = {0};
  for (int64_t l = 0; l < m->levels; l++) sums[l & 1] += products[l * CODES + id[l]];
  return sums[0] + sums[1];
}

/* Return a query as residuals are compared with it: without directions in which items do not differ, and weighted by
   what rounding leaves of a residual. */
static const float *weigh_query(const Model *m, const Work *w, const float *query, int bits) {
  const float *weights = m->residual_weights + (bits == 1 ? 0 : bits == 2 ? 1 : bits == 4 ? 2 : 3) * m->dim;
  float *weighed = w->weighed.at;
  memcpy(weighed, query, (size_t)m->dim * sizeof(float));
  for (int64_t n = 0; n < m->num_constant; n++) {
    const float *direction = m->constant + n * m->dim;
    add_scaled(weighed, -dot(direction, query, m->dim), direction, m->dim);
  }
  for (int64_t i = 0; i < m->dim; i++) weighed[i] *= weights[i];
  return weighed;
}

/* Score the hits of a query, which begin at ``hits``, by their embeddings; of residuals, without the vectors of IDs. The
   query that whole embeddings are compared with is not scaled by ``factor`` yet. */
static void score_embeddings(const Model *m, const Request *request, const float *query, float factor, const Hit *hits,
                             int64_t n, float *scores, Work *w) {
  int bits = (int)request->compared_bits;
  int64_t size = (m->dim * bits + 7) / 8;
  if (bits < 16) query = weigh_query(m, w, query, bits);
  float step = bits < 16 ? shorten(query, m->dim, (float)((1 << bits) - 1), w->short_query.at) : 0;
  Packed packed = bits < 16 ? pack_query(w->short_query.at, m->dim, bits, w->packed_query.at) : (Packed){0};
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
      scores[i + j] = bits < 16 ? (float)sums[j] * step * widen(part->scales[hit->item])
                                : multiply_row(rows[j], query, m->dim, 1) * factor;
    }
  }
}

/* Return what the density of an item costs, whose product with the query, not scaled, is given. */
static inline float find_density_cost(const Request *request, const Part *part, int64_t item, float product) {
  if (!part->densities) return 0;
  float share = (1 - product) / request->fade_width;
  share = share < 0 ? 0 : share > 1 ? 1 : share;
  return request->compared_density_step * share * share * share * (float)(part->densities[item] - ZERO_DENSITY);
}

/* Replace the hits of a query, which begin at ``first``, by the best of them by their embeddings. Residuals are compared
   with the ``query`` in the space of the codes. */
static int compare(const Model *m, const Request *request, const float *query, const float *compared, float factor,
                   int64_t first, Work *w) {
  int64_t n = w->num_hits - first, k = request->compared_k < n ? request->compared_k : n;
  if (!reserve(&w->keys, n, sizeof(uint64_t)) || !reserve(&w->chosen, k, sizeof(Hit)) ||
      !reserve(&w->scores, n, sizeof(float)))
    return NO_MEMORY;
  Hit *hits = (Hit *)w->hits.at + first, *chosen = w->chosen.at;
  float *scores = w->scores.at;
  int is_residual = request->compared_bits < 16;
  score_embeddings(m, request, is_residual ? query : compared, factor, hits, n, scores, w);
  for (int64_t i = 0; i < n && is_residual; i++) scores[i] += multiply_id(m, w, hits + i);
  for (int64_t i = 0; i < n; i++) {
    const Part *part = w->parts + hits[i].part;
    scores[i] -= find_density_cost(request, part, hits[i].item, scores[i] / factor);
  }
  uint64_t *keys = w->keys.at;
  for (int64_t i = 0; i < n; i++) keys[i] = make_key(scores[i], i);
  sort_keys(keys, n, k);
  for (int64_t i = 0; i < k; i++) {
    chosen[i] = hits[(uint32_t)keys[i]];
    chosen[i].score = scores[(uint32_t)keys[i]];
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
    const uint8_t *own = (uint8_t *)w->codes.at + b * scan->levels;
    float base = 0;
    for (int64_t l = 0; l < scan->shared && scan->request->k; l++) base += products[l * CODES + own[l]];
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

/* Rank what lies under the beams by codes. */
static int rank(const Model *m, const Request *request, int64_t decoded, const float *query, Work *w) {
  int64_t levels = m->levels, shared = decoded ? decoded : 1, ranges = w->rows * w->num_parts;
  w->num_kept = 0;
  if (!reserve(&w->best, SOME + 2 * request->k, sizeof(float))) return NO_MEMORY;
  Scan scan = {request, NULL, shared, levels, {w->best.at, request->k, 0, -INFINITY}, w, 0, 0, 0, {{0}}, 0, 0, 0, {0}, {0}};
  if (request->k || (request->compared_k && request->compared_bits < 16)) multiply_codes(m, w, decoded, query);
  if (request->k) {
    if (w->below < BLOCK * ranges) scan.shared = 1; /* blocks are of the IDs under several beams */
    scan.tables = (float *)w->products.at + scan.shared * CODES;
    if (levels - scan.shared + 2 <= COLUMNS && (scan.shared < shared || w->below > FEW * ranges))
      make_tables(&scan, levels - scan.shared);
  }
  int status;
  switch (levels - scan.shared) { /* the compiler unrolls the sums for the usual numbers of levels */
#define CASE(n) case n: status = scan_beams(&scan, n); break;
    CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
    default: status = scan_beams(&scan, (int)(levels - scan.shared));
  }
  if (status < 0) return status;
  raise(&scan.best);
  const Leaf *kept = w->kept.at;
  int64_t n = 0, limit_of_hits = request->k ? w->num_hits + request->k : INT64_MAX;
  if (!reserve(&w->keys, w->num_kept, sizeof(uint64_t))) return NO_MEMORY;
  uint64_t *keys = w->keys.at;
  for (int64_t i = 0; i < w->num_kept; i++)
    if (!(kept[i].score < scan.best.limit)) keys[n++] = make_key(kept[i].score, i);
  if (request->k) sort_keys(keys, n, request->k);
  for (int64_t i = 0; i < n && w->num_hits < limit_of_hits; i++) {
    const Leaf *leaf = kept + (uint32_t)keys[i];
    status = add_items(w->parts + leaf->part, leaf->part, leaf, limit_of_hits, w);
    if (status < 0) return status;
  }
  return 1;
}

/* Exported functions */

API int is_supported(void) {
#if defined(__AVX512F__)
  return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("bmi2") &&
         __builtin_cpu_supports("fma");
#elif defined(__AVX2__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return 1;
#endif
}

/* Codes of items: sums of code vectors, one of each level, that are near to vectors. */

static inline uint32_t find_smaller(const float *x, float than) { /* bits of the first LANES numbers */
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(_mm512_loadu_ps(x), _mm512_set1_ps(than), _CMP_LT_OQ);
#elif defined(__AVX2__)
  return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(x), _mm256_set1_ps(than), _CMP_LT_OQ));
#else
  uint32_t bits = 0;
  for (int lane = 0; lane < LANES; lane++) bits |= (uint32_t)(x[lane] < than) << lane;
  return bits;
#endif
}

/* Write the places of the smallest of n numbers, and these, in ascending order; of equal ones the first is kept.
   Return how many there are: at most ``most``, and none that is infinite. */
static int64_t find_smallest(const float *x, int64_t n, int64_t most, int32_t *places, float *smallest) {
  int64_t count = 0;
  for (int64_t first = 0; first < n; first += LANES) {
    uint32_t bits = find_smaller(x + first, count < most ? INFINITY : smallest[most - 1]);
    for (; bits; bits &= bits - 1) {
      int64_t place = first + __builtin_ctz(bits), at = count < most ? count : most - 1;
      if (count == most && x[place] >= smallest[at]) continue;
      for (; at && smallest[at - 1] > x[place]; at--) smallest[at] = smallest[at - 1], places[at] = places[at - 1];
      smallest[at] = x[place];
      places[at] = (int32_t)place;
      if (count < most) count++;
    }
  }
  return count;
}

/* Find codes[n][levels] by beam search, TOGETHER vectors at a time, for which the products that a level needs stay in the
   cache. products[n][levels][CODES]: of the vectors and the code vectors. halves[levels][CODES]: half squared norms of
   code vectors, infinite where a level has no such code. crossed: for each level, products of the earlier levels' code
   vectors with its own: [earlier levels][CODES][CODES]. Return 1, or NO_MEMORY. */
API int nearest_sums(const float *products, const float *halves, const float *crossed, int64_t n, int64_t levels,
                     int64_t beam, uint8_t *codes) {
  float *sums = malloc((size_t)(TOGETHER * beam * CODES + 2 * TOGETHER * beam) * sizeof(float));
  int32_t *places = malloc((size_t)beam * sizeof(int32_t));
  uint8_t *paths = malloc((size_t)((TOGETHER + 1) * beam * levels));
  int64_t widths[TOGETHER];
  float *errors = sums + TOGETHER * beam * CODES;
  uint8_t *longer = paths + TOGETHER * beam * levels;
  for (int64_t start = 0; start < n && sums && places && paths; start += TOGETHER) {
    int64_t rows = n - start < TOGETHER ? n - start : TOGETHER;
    const float *earlier = crossed;
    for (int64_t i = 0; i < rows; i++) widths[i] = 1, errors[i * beam] = 0;
    for (int64_t level = 0; level < levels; level++) {
      for (int64_t i = 0; i < rows; i++)
        for (int64_t b = 0; b < widths[i]; b++) {
          const float *own = products + ((start + i) * levels + level) * CODES, *half = halves + level * CODES;
          const uint8_t *path = paths + (i * beam + b) * levels;
          for (int64_t c = 0; c < CODES; c += 4 * LANES) {
            vec sum[4];
            for (int v = 0; v < 4; v++)
              sum[v] = *(const vec *)(half + c + v * LANES) + errors[i * beam + b] - *(const vec *)(own + c + v * LANES);
            for (int64_t before = 0; before < level; before++) {
              const float *more = earlier + (before * CODES + path[before]) * CODES + c;
              for (int v = 0; v < 4; v++) sum[v] += *(const vec *)(more + v * LANES);
            }
            memcpy(sums + (i * beam + b) * CODES + c, sum, sizeof sum);
          }
        }
      earlier += level * CODES * CODES;
      for (int64_t i = 0; i < rows; i++) {
        uint8_t *own = paths + i * beam * levels;
        widths[i] = find_smallest(sums + i * beam * CODES, widths[i] * CODES, beam, places, errors + i * beam);
        for (int64_t b = 0; b < widths[i]; b++) {
          memcpy(longer + b * levels, own + places[b] / CODES * levels, (size_t)level);
          longer[b * levels + level] = (uint8_t)(places[b] % CODES);
        }
        memcpy(own, longer, (size_t)(widths[i] * levels));
      }
    }
    for (int64_t i = 0; i < rows; i++) memcpy(codes + (start + i) * levels, paths + i * beam * levels, (size_t)levels);
  }
  int is_done = sums && places && paths;
  free(sums), free(places), free(paths);
  return is_done ? 1 : NO_MEMORY;
}

/* Add each vector of vectors[n][dim] to the row of sums[][dim] that its code names. */
API void sum_by_code(const float *vectors, const int64_t *codes, int64_t n, int64_t dim, float *sums) {
  for (int64_t i = 0; i < n; i++)
    for (int64_t d = 0; d < dim; d++) sums[codes[i] * dim + d] += vectors[i * dim + d];
}

API Work *make_work(void) { return calloc(1, sizeof(Work)); }

/* Return whether the tables and embeddings that a request is about are of the model's levels and dimensions. Their other
   lengths and numbers were compared when the index was opened; those that lead elsewhere are compared again. */
static int fits(const Model *m, const Request *request, const Part *parts, int64_t num_parts) {
  for (const Part *part = parts; part < parts + num_parts; part++) {
    int64_t costs = part->table->columns - m->levels;
    if (costs != 0 && costs != 2) return 0;
    int64_t bytes = (m->dim * request->compared_bits + 7) / 8 * part->table->num_items;
    if (request->compared_k && part->embedding_bytes != bytes) return 0;
  }
  return 1;
}

/* Search for some queries, queries[n][dim]; embeddings are compared with ``compared`` [n][dim]. What is found lies in
   ``w`` until its next search. */
API int search(const Model *m, const Part *parts, int64_t num_parts, const Request *requests, const float *queries,
               const float *compared, int64_t n, Work *w) {
  int64_t levels = m->levels;
  w->num_parts = num_parts;
  w->num_hits = 0;
  if (!reserve(&w->products, (levels + 2) * CODES, sizeof(float)) || !reserve(&w->scaled, m->dim, sizeof(float)) ||
      !reserve(&w->weighed, m->dim, sizeof(float)) || !reserve(&w->short_query, m->dim, sizeof(int16_t)) ||
      !reserve(&w->packed_query, m->dim + 8 * BLOCK, 2 * sizeof(int16_t)) || !reserve(&w->all_results, n, sizeof(Result)))
    return NO_MEMORY;
  memset(w->products.at, 0, (size_t)(levels + 2) * CODES * sizeof(float));
  Result *results = w->all_results.at;
  for (int64_t q = 0; q < n; q++, queries += m->dim) {
    int64_t before = w->num_hits;
    w->touched = 0;
    w->parts = parts + requests[q].first_part;
    if (!fits(m, requests + q, w->parts, num_parts)) return DAMAGED;
    float factor = standardize_query(m, requests + q, queries, w);
    const float *query = w->scaled.at;
    int64_t decoded = find_beams(m, requests + q, query, w);
    if (decoded < 0) return (int)decoded;
    int status = rank(m, requests + q, decoded, query, w);
    if (status > 0 && requests[q].compared_k)
      status = compare(m, requests + q, query, compared + q * m->dim, factor, before, w);
    if (status < 0) return status;
    for (int64_t i = before; i < w->num_hits; i++) ((Hit *)w->hits.at)[i].score /= factor;
    if (!reserve(&w->hits_decoded, w->num_hits * levels, sizeof(float))) return NO_MEMORY;
    for (int64_t i = before; i < w->num_hits; i++) {
      float *own = (float *)w->hits_decoded.at + i * levels;
      for (int64_t l = 0; l < levels; l++) own[l] = NAN;
      memcpy(own, (float *)w->gained.at + ((Hit *)w->hits.at)[i].beam * levels, (size_t)decoded * sizeof(float));
    }
    results[q] = (Result){w->num_hits - before, w->touched};
  }
  w->found = w->hits.at;
  w->decoded = w->hits_decoded.at;
  w->results = results;
  return 1;
}
