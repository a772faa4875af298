/* Search of ID tables for one query: beam search by code vectors or by a generator of one block, then ranking by
   codes.

   The plain search in search/beam.py and search/rank.py defines the results; tests compare the two. compiled.py
   fills the structures below, whose fields must be the same there. Nothing that is read from a table is trusted:
   rows out of range end the search with DAMAGED. Compiled by build.py, in variants for different processors. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#ifdef _WIN32
#define API __declspec(dllexport)
#else
#define API __attribute__((visibility("default")))
#endif

enum { BLOCK = 64, CODES = 256, BUCKETS = 512, SMALL = 24 };
enum { DAMAGED = -1, NO_MEMORY = -2 };

typedef float vec __attribute__((vector_size(32), aligned(4), may_alias)); /* eight floats */
enum { LANES = 8 };

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
} Part;

typedef struct { /* a decoder of one block, as T5Decoder arranges it; matrices are packed as for product() */
  int64_t width, feedforward, heads, head_width, prefixes;
  const float *prefix_weights, *prefix_biases; /* from a query to its prefix vectors: [prefixes][width] */
  const float *prefix_keys_values;             /* from a prefix vector to keys and values: [2][heads][head_width] */
  const float *prefix_sides;                   /* from a head's keys or values to the tokens' space: [2][heads] */
  const float *tokens;     /* queries, keys and values of the start token and of all codes: [tokens][3][heads][head_width] */
  const float *embeddings; /* of the same: [tokens][width] */
  const float *distances;  /* added to self-attention, by distance: [heads][levels] */
  const float *token_out, *up, *down;
  const float *codes;      /* from a hidden state to the codes' logits, level after level */
  const float *scales, *gates; /* of nearness and of these logits: [levels] */
  const float *biases;         /* added to both: [levels][CODES] */
} Generator;

typedef struct {
  int64_t levels, dim;
  int64_t gram_levels;  /* levels that gram covers */
  const Generator *generator; /* NULL: codes are scored by nearness alone */
  const int32_t *sizes; /* codes of each level, at most CODES */
  const float *vectors; /* code vectors; each level in blocks of BLOCK codes: [block][dim][BLOCK] */
  const float *halves;  /* half squared norms: [levels][CODES] */
  const float *gram;    /* inner products of the code vectors of these levels: [codes][gram_levels][CODES] */
} Model;

typedef struct {
  int64_t width;      /* beam width */
  int64_t candidates; /* finish once at most this many IDs (or width, if larger) lie under the beams */
  int64_t k;          /* number of hits; 0 lists all items under the beams, unranked */
  uint8_t level0[CODES / 8]; /* bit vector of the allowed codes at level 0 */
  float half_norm_step, density_step; /* costs of the two bytes after an ID's codes */
  float generator_weight;
} Request;

typedef struct {
  int64_t part, item, row, beam;
  double score;
} Hit;

typedef struct {
  const Hit *hits;
  const float *decoded; /* log-probabilities of the codes of each hit's beam: [num_hits][levels]; NaN: not decoded */
  int64_t num_hits;
  int64_t touched; /* items under the beams */
} Result;

typedef struct {
  int32_t row, code; /* row of the frontier, and the code that follows it */
  int32_t count;     /* allowed IDs below */
  float gained, total;
} Child;

typedef struct {
  uint64_t key; /* smaller is better; equal scores keep their order */
  int32_t part, row, beam;
  float score;
} Leaf;

typedef struct {
  void *at;
  size_t bytes;
} Buffer;

typedef struct { /* the memory of a search, kept for the next one */
  Buffer codes, gained, total, ranges; /* the frontier: [rows][levels], [rows][levels], [rows], [rows][parts][2] */
  Buffer next_codes, next_gained, next_total, next_ranges;
  Buffer logits, generated;         /* [rows][CODES] */
  Buffer keys_values;               /* of a query's prefix vectors, in the tokens' space: [2][heads][prefixes][width] */
  Buffer hidden, normed, inner;     /* the generator's: one row for each of the frontier */
  Buffer children, spans, buckets;  /* spans: [children][parts][2] */
  Buffer keys, leaves, hits, decoded;
  int64_t rows, num_children, num_keys, num_hits, touched;
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
    for (; q < n; q++) block_product(weights, in, x + q * stride, stride, y + q * y_stride, y_stride, 1, 8);
  }
}

static inline int64_t padded(int64_t size) { return (size + BLOCK - 1) / BLOCK * BLOCK; }

/* Scores of codes */

/* Score every code of a level after a prefix by the nearness of the query: r·e − |e|²/2 with the residual r. */
static int score_nearness(const Model *m, Work *w, int64_t level, const uint8_t *codes, const float *query,
                          const float *products, float *scores) {
  const float *halves = m->halves + level * CODES;
  if (level < m->gram_levels) {
    const float *gram = m->gram + level * CODES;
    for (int c = 0; c < CODES; c++) scores[c] = products[level * CODES + c] - halves[c];
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
  for (int64_t l = 0; l < level; vectors += padded(m->sizes[l]) * m->dim, l++) {
    const float *vector = vectors + codes[l] / BLOCK * BLOCK * m->dim + codes[l] % BLOCK;
    for (int64_t i = 0; i < m->dim; i++) residual[i] -= vector[i * BLOCK];
  }
  product(vectors, m->dim, m->sizes[level], residual, 0, scores, 0, 1);
  for (int64_t c = 0; c < m->sizes[level]; c++) scores[c] -= halves[c];
  return 1;
}

/* The generator */

static float dot(const float *x, const float *y, int64_t n) {
  vec sums = {0};
  float sum = 0;
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) sums += *(const vec *)(x + i) * *(const vec *)(y + i);
  for (; i < n; i++) sum += x[i] * y[i];
  for (int lane = 0; lane < LANES; lane++) sum += sums[lane];
  return sum;
}

static void add_scaled(float *x, float scale, const float *y, int64_t n) {
  for (int64_t i = 0; i < n; i++) x[i] += scale * y[i];
}

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

/* Compute the keys and values of a query's prefix vectors. */
static int read_query(const Model *m, Work *w, const float *query) {
  const Generator *g = m->generator;
  int64_t heads = g->heads, width = g->width, stride = padded(2 * heads * g->head_width), side = padded(width);
  int64_t size = padded(g->prefixes * width);
  if (!reserve(&w->keys_values, (2 * heads * g->prefixes + 1) * side, sizeof(float)) ||
      !reserve(&w->inner, size + g->prefixes * stride, sizeof(float)))
    return 0;
  float *vectors = w->inner.at, *projected = vectors + size, *sides = w->keys_values.at;
  product(g->prefix_weights, m->dim, g->prefixes * width, query, 0, vectors, 0, 1);
  for (int64_t i = 0; i < g->prefixes * width; i++) vectors[i] += g->prefix_biases[i];
  for (int64_t p = 0; p < g->prefixes; p++) normalize(g, vectors + p * width, vectors + p * width);
  product(g->prefix_keys_values, width, stride, vectors, width, projected, stride, g->prefixes);
  for (int64_t h = 0; h < 2 * heads; h++)
    product(g->prefix_sides + h * g->head_width * side, g->head_width, width, projected + h * g->head_width, stride,
            sides + h * g->prefixes * side, side, g->prefixes);
  return 1;
}

/* Self-attention of the last token of a prefix to all its tokens; their keys and values depend on nothing else. */
static void attend_to_codes(const Model *m, const uint8_t *codes, int64_t level, float *attended) {
  const Generator *g = m->generator;
  int64_t inner = g->heads * g->head_width, first = 1;
  const float *tokens[CODES];
  tokens[0] = g->tokens;
  for (int64_t l = 0; l < level; first += m->sizes[l], l++) tokens[l + 1] = g->tokens + (first + codes[l]) * 3 * inner;
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

static void attend_to_query(const Generator *g, const Work *w, float *hidden, const float *normed) {
  int64_t side = padded(g->width);
  for (int64_t h = 0; h < g->heads; h++) {
    const float *keys = (float *)w->keys_values.at + h * g->prefixes * side;
    const float *values = keys + g->heads * g->prefixes * side;
    float shares[CODES];
    for (int64_t p = 0; p < g->prefixes; p++) shares[p] = dot(normed, keys + p * side, g->width);
    float sum = exponentials(shares, g->prefixes, find_largest(shares, g->prefixes));
    for (int64_t p = 0; p < g->prefixes; p++) add_scaled(hidden, shares[p] / sum, values + p * side, g->width);
  }
}

/* Compute the generator's logits of a level's codes after each row of the frontier. */
static int generate(const Model *m, Work *w, int64_t level) {
  const Generator *g = m->generator;
  int64_t inner = g->heads * g->head_width, side = padded(g->width), high = padded(g->feedforward), first = 1;
  int64_t stride = inner > high ? inner : high;
  if (!reserve(&w->hidden, w->rows * side, sizeof(float)) || !reserve(&w->normed, w->rows * side, sizeof(float)) ||
      !reserve(&w->inner, w->rows * stride, sizeof(float)) || !reserve(&w->generated, w->rows * CODES, sizeof(float)))
    return 0;
  float *hidden = w->hidden.at, *normed = w->normed.at, *between = w->inner.at;
  for (int64_t l = 0; l + 1 < level; l++) first += m->sizes[l];
  for (int64_t r = 0; r < w->rows; r++)
    attend_to_codes(m, (uint8_t *)w->codes.at + r * m->levels, level, between + r * stride);
  product(g->token_out, inner, g->width, between, stride, hidden, side, w->rows);
  for (int64_t r = 0; r < w->rows; r++) {
    int64_t token = level ? first + ((uint8_t *)w->codes.at)[r * m->levels + level - 1] : 0;
    add_scaled(hidden + r * side, 1, g->embeddings + token * g->width, g->width);
    normalize(g, hidden + r * side, normed + r * side);
    attend_to_query(g, w, hidden + r * side, normed + r * side);
    normalize(g, hidden + r * side, normed + r * side);
  }
  product(g->up, g->width, g->feedforward, normed, side, between, stride, w->rows);
  for (int64_t i = 0; i < w->rows * stride; i++) between[i] = between[i] > 0 ? between[i] : 0;
  product(g->down, g->feedforward, g->width, between, stride, normed, side, w->rows);
  for (int64_t r = 0; r < w->rows; r++) {
    add_scaled(hidden + r * side, 1, normed + r * side, g->width);
    normalize(g, hidden + r * side, normed + r * side);
  }
  const float *codes = g->codes;
  for (int64_t l = 0; l < level; l++) codes += padded(m->sizes[l]) * g->width;
  product(codes, g->width, m->sizes[level], normed, side, w->generated.at, CODES, w->rows);
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
static int score_codes(const Model *m, Work *w, int64_t level, const float *products, const float *query) {
  if (!reserve(&w->logits, w->rows * CODES, sizeof(float))) return 0;
  if (m->generator && ((level == 0 && !read_query(m, w, query)) || !generate(m, w, level))) return 0;
  for (int64_t r = 0; r < w->rows; r++) {
    float *scores = (float *)w->logits.at + r * CODES;
    const uint8_t *codes = (uint8_t *)w->codes.at + r * m->levels;
    if (!score_nearness(m, w, level, codes, query, products, scores)) return 0;
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

static int add_child(Work *w, int64_t num_parts, int64_t row, int64_t code, int64_t count, const int32_t *span) {
  int64_t n = w->num_children++;
  if (!reserve(&w->children, n + 1, sizeof(Child))) return 0;
  if (!reserve(&w->spans, (n + 1) * num_parts * 2, sizeof(int32_t))) return 0;
  ((Child *)w->children.at)[n] = (Child){(int32_t)row, (int32_t)code, (int32_t)count, 0, 0};
  memcpy((int32_t *)w->spans.at + n * num_parts * 2, span, (size_t)num_parts * 2 * sizeof(int32_t));
  return 1;
}

/* List the codes that continue each row of the frontier: by row, then by code; only those with allowed IDs. */
static int list_children(const Model *m, const Part *parts, int64_t num_parts, int64_t level, const Request *request, Work *w) {
  w->num_children = 0;
  int64_t span = num_parts * 2;
  if (!reserve(&w->buckets, CODES * span, sizeof(int32_t))) return NO_MEMORY;
  int32_t *found = w->buckets.at; /* [CODES][parts][2]; with one part only its first line is used */
  for (int64_t r = 0; r < w->rows; r++) {
    const int32_t *ranges = (int32_t *)w->ranges.at + r * span;
    int64_t counts[CODES];
    uint64_t seen[CODES / 64] = {0};
    for (int64_t p = 0; p < num_parts; p++) {
      const Part *part = parts + p;
      const Table *table = part->table;
      int64_t low = ranges[2 * p], high = ranges[2 * p + 1];
      if (low >= high) continue;
      int64_t first = table->level_bounds[level], count = table->level_bounds[level + 1] - first;
      int64_t skipped = first_above(table->starts + first, count, low + 1);
      const int32_t *starts = table->starts + first + skipped;
      int64_t branches = first_above(starts, count - skipped, high);
      const uint8_t *codes = table->start_codes + first + skipped;
      int is_known = first + skipped + branches <= table->num_start_codes;
      for (int64_t b = 0; b <= branches; b++) {
        int64_t end = b < branches ? starts[b] : high;
        if (end <= low || end > high) return DAMAGED;
        int code = b && is_known ? codes[b - 1] : table->ids[low * table->columns + level];
        if (code >= m->sizes[level]) return DAMAGED;
        int64_t below = count_rows(part, low, end);
        if (below && (level || request->level0[code >> 3] >> (code & 7) & 1)) {
          int32_t *own = num_parts == 1 ? found : found + code * span;
          if (num_parts > 1 && !(seen[code >> 6] >> (code & 63) & 1)) {
            seen[code >> 6] |= 1ull << (code & 63);
            counts[code] = 0;
            memset(own, 0, (size_t)span * sizeof(int32_t));
          }
          own[2 * p] = (int32_t)low;
          own[2 * p + 1] = (int32_t)end;
          if (num_parts == 1 && !add_child(w, 1, r, code, below, own)) return NO_MEMORY;
          if (num_parts > 1) counts[code] += below;
        }
        low = end;
      }
    }
    for (int code = 0; num_parts > 1 && code < CODES; code++)
      if (seen[code >> 6] >> (code & 63) & 1 && !add_child(w, num_parts, r, code, counts[code], found + code * span))
        return NO_MEMORY;
  }
  return 1;
}

/* Choice of the best children */

static inline uint64_t make_key(float score, int64_t order) { /* ascending keys: descending scores, then order */
  uint32_t bits;
  score += 0.0f; /* no negative zero */
  memcpy(&bits, &score, sizeof bits);
  bits = bits >> 31 ? bits : ~bits & 0x7fffffff;
  return (uint64_t)bits << 32 | (uint32_t)order;
}

static int compare_keys(const void *one, const void *other) {
  uint64_t a = *(const uint64_t *)one, b = *(const uint64_t *)other;
  return (a > b) - (a < b);
}

static void sort_keys(uint64_t *keys, int64_t count) {
  if (count > SMALL) {
    qsort(keys, (size_t)count, sizeof *keys, compare_keys);
    return;
  }
  for (int64_t i = 1; i < count; i++) {
    uint64_t key = keys[i];
    int64_t j = i;
    for (; j > 0 && keys[j - 1] > key; j--) keys[j] = keys[j - 1];
    keys[j] = key;
  }
}

/* Sort the best children into keys: as many as the beam is wide, or more if all IDs below them fit the budget.

   A histogram of the scores finds a score that certainly suffices; only what is above it is sorted. Returns the
   number of IDs below. */
static int64_t choose(Work *w, const Request *request, int64_t budget) {
  const Child *children = w->children.at;
  int64_t n = w->num_children, weights[BUCKETS] = {0};
  int32_t numbers[BUCKETS] = {0}, begins[BUCKETS];
  if (!reserve(&w->buckets, n, sizeof(int16_t)) || !reserve(&w->keys, n, sizeof(uint64_t))) return NO_MEMORY;
  int16_t *bucket_of = w->buckets.at;
  uint64_t *keys = w->keys.at;
  float best = -INFINITY;
  double sum = 0;
  int64_t possible = 0;
  for (int64_t i = 0; i < n; i++) {
    float total = children[i].total;
    if (!(total > -INFINITY)) continue;
    if (total > best) best = total;
    sum += total;
    possible++;
  }
  float spread = (float)(best - sum / (double)possible), scale = spread > 0 ? BUCKETS / (2 * spread) : 0;
  for (int64_t i = 0; i < n; i++) {
    float total = children[i].total, place = (best - total) * scale;
    int bucket = total > -INFINITY ? place < BUCKETS - 1 ? (int)place : BUCKETS - 1 : -1;
    bucket_of[i] = (int16_t)bucket;
    if (bucket < 0) continue;
    numbers[bucket]++;
    weights[bucket] += children[i].count;
  }
  int64_t weight = 0, last = 0;
  int32_t number = 0;
  for (; last < BUCKETS; last++) {
    begins[last] = number;
    number += numbers[last];
    weight += weights[last];
    if (number >= request->width && weight > budget) break;
  }
  for (int64_t i = 0; i < n; i++)
    if (bucket_of[i] >= 0 && bucket_of[i] <= last) keys[begins[bucket_of[i]]++] = make_key(children[i].total, i);
  int64_t below = 0, chosen = 0, sorted = 0;
  for (int64_t bucket = 0; bucket <= last && bucket < BUCKETS; bucket++) {
    sort_keys(keys + sorted, numbers[bucket]);
    sorted += numbers[bucket];
    for (; chosen < sorted; chosen++) {
      int64_t count = children[(uint32_t)keys[chosen]].count;
      if (chosen >= request->width && below + count > budget) goto done;
      below += count;
    }
  }
done:
  w->num_keys = chosen;
  return below;
}

/* Make the chosen children the frontier. */
static int extend(const Model *m, Work *w, int64_t num_parts, int64_t level) {
  int64_t n = w->num_keys, levels = m->levels, span = 2 * num_parts;
  if (!reserve(&w->next_codes, n * levels, 1) || !reserve(&w->next_gained, n * levels, sizeof(float)) ||
      !reserve(&w->next_total, n, sizeof(float)) || !reserve(&w->next_ranges, n * span, sizeof(int32_t)))
    return 0;
  for (int64_t i = 0; i < n; i++) {
    int64_t number = (uint32_t)((uint64_t *)w->keys.at)[i];
    const Child *child = (Child *)w->children.at + number;
    uint8_t *codes = (uint8_t *)w->next_codes.at + i * levels;
    float *gained = (float *)w->next_gained.at + i * levels;
    memcpy(codes, (uint8_t *)w->codes.at + child->row * levels, (size_t)level);
    memcpy(gained, (float *)w->gained.at + child->row * levels, (size_t)level * sizeof(float));
    codes[level] = (uint8_t)child->code;
    gained[level] = child->gained;
    ((float *)w->next_total.at)[i] = child->total;
    memcpy((int32_t *)w->next_ranges.at + i * span, (int32_t *)w->spans.at + number * span,
           (size_t)span * sizeof(int32_t));
  }
  swap(&w->codes, &w->next_codes);
  swap(&w->gained, &w->next_gained);
  swap(&w->total, &w->next_total);
  swap(&w->ranges, &w->next_ranges);
  w->rows = n;
  return 1;
}

/* Find the beams of a query; return the number of levels that were decoded. */
static int64_t find_beams(const Model *m, const Part *parts, int64_t num_parts, const Request *request,
                          const float *query, const float *products, Work *w) {
  int64_t budget = request->candidates > request->width ? request->candidates : request->width;
  if (!reserve(&w->codes, m->levels, 1) || !reserve(&w->gained, m->levels, sizeof(float)) ||
      !reserve(&w->total, 1, sizeof(float)) || !reserve(&w->ranges, 2 * num_parts, sizeof(int32_t)))
    return NO_MEMORY;
  w->rows = 1;
  *(float *)w->total.at = 0;
  for (int64_t p = 0; p < num_parts; p++) {
    ((int32_t *)w->ranges.at)[2 * p] = 0;
    ((int32_t *)w->ranges.at)[2 * p + 1] = (int32_t)parts[p].table->rows;
  }
  for (int64_t level = 0;; level++) {
    int status = list_children(m, parts, num_parts, level, request, w);
    if (status < 0) return status;
    Child *children = w->children.at;
    if (level == 0) {
      int64_t below = 0;
      for (int64_t i = 0; i < w->num_children; i++) below += children[i].count;
      if (below <= budget) { /* nothing to decode */
        if (!reserve(&w->keys, w->num_children, sizeof(uint64_t))) return NO_MEMORY;
        for (int64_t i = 0; i < w->num_children; i++) ((uint64_t *)w->keys.at)[i] = (uint64_t)i;
        w->num_keys = w->num_children;
        return extend(m, w, num_parts, 0) ? 0 : NO_MEMORY;
      }
    }
    if (!score_codes(m, w, level, products, query)) return NO_MEMORY;
    for (int64_t i = 0; i < w->num_children; i++) {
      children[i].gained = ((float *)w->logits.at)[children[i].row * CODES + children[i].code];
      children[i].total = ((float *)w->total.at)[children[i].row] + children[i].gained;
    }
    int64_t below = choose(w, request, budget);
    if (below < 0 || !extend(m, w, num_parts, level)) return NO_MEMORY;
    if (below <= budget || level + 1 == m->levels) return level + 1;
  }
}

/* Ranking of the IDs under the beams */

static void sift_down(Leaf *leaves, int64_t count, int64_t place) { /* the worst leaf is on top */
  Leaf leaf = leaves[place];
  for (int64_t child; (child = 2 * place + 1) < count; place = child) {
    if (child + 1 < count && leaves[child + 1].key > leaves[child].key) child++;
    if (leaves[child].key <= leaf.key) break;
    leaves[place] = leaves[child];
  }
  leaves[place] = leaf;
}

typedef struct {
  Leaf *leaves;
  int64_t k, count, seen;
  float limit; /* once there are k: the lowest score; an equal one that is seen later does not belong to them */
} Best;

static inline __attribute__((always_inline)) void offer(Best *best, float score, int64_t part, int64_t row, int64_t beam) {
  int64_t order = best->seen++;
  if (score <= best->limit) return;
  Leaf leaf = {make_key(score, order), (int32_t)part, (int32_t)row, (int32_t)beam, score};
  if (best->count < best->k) {
    best->leaves[best->count++] = leaf;
    if (best->count < best->k) return;
    for (int64_t i = best->k / 2; i-- > 0;) sift_down(best->leaves, best->k, i);
  } else {
    best->leaves[0] = leaf;
    sift_down(best->leaves, best->k, 0);
  }
  best->limit = best->leaves[0].score;
}

static int add_items(const Part *part, int64_t number, const Leaf *leaf, int64_t limit, Work *w) {
  const Table *table = part->table;
  int64_t low = table->bucket_starts[leaf->row], high = table->bucket_starts[leaf->row + 1];
  if (low < 0 || low > high || high > table->num_items) return DAMAGED;
  for (int64_t place = low; place < high && w->num_hits < limit; place++) {
    int64_t item = table->items[place];
    if (item < 0 || item >= table->num_items) return DAMAGED;
    if (part->allowed && !part->allowed[item]) continue;
    if (!reserve(&w->hits, w->num_hits + 1, sizeof(Hit))) return NO_MEMORY;
    ((Hit *)w->hits.at)[w->num_hits++] = (Hit){number, item, leaf->row, leaf->beam, leaf->score};
  }
  return 1;
}

/* Count the allowed items of an ID, or of the rows up to ``end`` if all are allowed. */
static int64_t count_items(const Part *part, int64_t row, int64_t end) {
  const Table *table = part->table;
  int64_t low = table->bucket_starts[row], high = table->bucket_starts[end], count = 0;
  if (low < 0 || low > high || high > table->num_items) return DAMAGED;
  if (!part->allowed) return high - low;
  for (int64_t place = low; place < high; place++) {
    int64_t item = table->items[place];
    if (item < 0 || item >= table->num_items) return DAMAGED;
    count += part->allowed[item];
  }
  return count;
}

static inline __attribute__((always_inline)) float sum_codes(const float *tables, const uint8_t *codes, const int n) {
  float sums[4] = {0};
  for (int l = 0; l < n; l++) sums[l & 3] += tables[l * CODES + codes[l]];
  return sums[0] + sums[1] + (sums[2] + sums[3]);
}

/* The score of an ID: the compiler unrolls the sum for the usual numbers of levels. */
static inline float score_leaf(const uint8_t *id, const float *tables, int64_t shared, int64_t levels, int has_costs,
                               const Request *request) {
  float score = has_costs ? -(request->half_norm_step * id[levels] + request->density_step * id[levels + 1]) : 0;
  id += shared;
  tables += shared * CODES;
#define CASE(n) case n: return score + sum_codes(tables, id, n);
  switch (levels - shared) {
    CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
    default: return score + sum_codes(tables, id, (int)(levels - shared));
  }
#undef CASE
}

/* Fetch what ranking is going to read first of each beam. */
static void prefetch(const Part *parts, int64_t num_parts, const Work *w) {
  const int32_t *range = w->ranges.at;
  for (int64_t i = 0; i < w->rows * num_parts; i++, range += 2) {
    const Table *table = parts[i % num_parts].table;
    __builtin_prefetch(table->ids + range[0] * table->columns);
    __builtin_prefetch(table->bucket_starts + range[0]);
  }
}

/* Rank what lies under the beams by codes. */
static int rank(const Model *m, const Part *parts, int64_t num_parts, const Request *request, int64_t decoded,
                const float *products, Work *w) {
  int64_t shared = decoded ? decoded : 1; /* codes that all IDs under a beam share */
  if (!reserve(&w->leaves, request->k, sizeof(Leaf))) return NO_MEMORY;
  Best best = {w->leaves.at, request->k, 0, 0, -INFINITY};
  prefetch(parts, num_parts, w);
  for (int64_t b = 0; b < w->rows; b++) {
    const uint8_t *codes = (uint8_t *)w->codes.at + b * m->levels;
    float base = decoded ? request->generator_weight * ((float *)w->total.at)[b] : 0;
    for (int64_t l = 0; l < shared; l++) base += products[l * CODES + codes[l]];
    for (int64_t p = 0; p < num_parts; p++) {
      const Part *part = parts + p;
      const Table *table = part->table;
      const int32_t *range = (int32_t *)w->ranges.at + (b * num_parts + p) * 2;
      int64_t low = range[0], high = range[1], columns = table->columns;
      if (low >= high) continue;
      int has_costs = columns > m->levels;
      for (int64_t word = low >> 6; word <= (high - 1) >> 6; word++) {
        int64_t first = word << 6, row = low > first ? low : first, end = high < first + 64 ? high : first + 64;
        uint64_t bits = part->words ? part->words[word] : ~0ull;
        bits &= ~0ull << (row - first) & ~0ull >> (first + 64 - end);
        if (!part->words) {
          int64_t items = count_items(part, row, end);
          if (items < 0) return DAMAGED;
          w->touched += items;
        }
        for (; bits; bits &= bits - 1) {
          int64_t own = first + __builtin_ctzll(bits);
          if (part->words) {
            int64_t items = count_items(part, own, own + 1);
            if (items < 0) return DAMAGED;
            w->touched += items;
          }
          if (request->k) {
            const uint8_t *id = table->ids + own * columns;
            offer(&best, base + score_leaf(id, products, shared, m->levels, has_costs, request), p, own, b);
          } else {
            Leaf leaf = {0, (int32_t)p, (int32_t)own, (int32_t)b, 0};
            int status = add_items(part, p, &leaf, INT64_MAX, w);
            if (status < 0) return status;
          }
        }
      }
    }
  }
  if (best.count < best.k)
    for (int64_t i = best.count / 2; i-- > 0;) sift_down(best.leaves, best.count, i);
  for (int64_t left = best.count; left-- > 1;) { /* best first */
    Leaf worst = best.leaves[0];
    best.leaves[0] = best.leaves[left];
    best.leaves[left] = worst;
    sift_down(best.leaves, left, 0);
  }
  for (int64_t i = 0; i < best.count && w->num_hits < request->k; i++) {
    int status = add_items(parts + best.leaves[i].part, best.leaves[i].part, best.leaves + i, request->k, w);
    if (status < 0) return status;
  }
  return 1;
}

/* Exported functions */

API int is_supported(void) {
#if defined(__AVX2__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return 1;
#endif
}

API Work *make_work(void) { return calloc(1, sizeof(Work)); }

/* products[n][levels][CODES]: the inner products of queries with the code vectors of the first levels. */
API void multiply(const Model *m, const float *queries, int64_t n, int64_t levels, float *products) {
  const float *vectors = m->vectors;
  for (int64_t level = 0; level < levels; vectors += padded(m->sizes[level]) * m->dim, level++)
    product(vectors, m->dim, m->sizes[level], queries, m->dim, products + level * CODES, m->levels * CODES, n);
}

static inline vec widen(const int8_t *bytes) {
#ifdef __AVX2__
  return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)bytes)));
#else
  vec values;
  for (int lane = 0; lane < LANES; lane++) values[lane] = bytes[lane];
  return values;
#endif
}

/* products[n]: the inner products of a query and some rows of 8-bit vectors. */
API void multiply_bytes(const int8_t *vectors, const int64_t *rows, const float *query, float *products, int64_t dim,
                        int64_t n) {
  for (int64_t r = 0; r < n; r++) {
    const int8_t *vector = vectors + rows[r] * dim;
    if (r + 4 < n)
      for (int64_t i = 0; i < dim; i += 64) __builtin_prefetch(vectors + rows[r + 4] * dim + i);
    vec sums[2] = {0};
    int64_t i = 0;
    for (; i + 2 * LANES <= dim; i += 2 * LANES)
      for (int half = 0; half < 2; half++)
        sums[half] += widen(vector + i + half * LANES) * *(const vec *)(query + i + half * LANES);
    float sum = 0;
    for (; i < dim; i++) sum += vector[i] * query[i];
    for (int lane = 0; lane < LANES; lane++) sum += sums[0][lane] + sums[1][lane];
    products[r] = sum;
  }
}

/* Search for one query, given its products with the code vectors: of the first levels if ``k`` is 0, else of all.
   What ``result`` points to lasts until the next search with ``w``. */
API int search(const Model *m, const Part *parts, int64_t num_parts, const Request *request, const float *query,
               const float *products, Work *w, Result *result) {
  w->num_hits = w->touched = 0;
  int64_t decoded = find_beams(m, parts, num_parts, request, query, products, w);
  if (decoded < 0) return (int)decoded;
  int status = rank(m, parts, num_parts, request, decoded, products, w);
  if (status < 0) return status;
  if (!reserve(&w->decoded, w->num_hits * m->levels, sizeof(float))) return NO_MEMORY;
  for (int64_t i = 0; i < w->num_hits; i++) {
    float *own = (float *)w->decoded.at + i * m->levels;
    for (int64_t l = 0; l < m->levels; l++) own[l] = NAN;
    memcpy(own, (float *)w->gained.at + ((Hit *)w->hits.at)[i].beam * m->levels, (size_t)decoded * sizeof(float));
  }
  *result = (Result){w->hits.at, w->decoded.at, w->num_hits, w->touched};
  return 1;
}
