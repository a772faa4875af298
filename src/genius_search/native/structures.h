/* Structures of the search, which search/kernel.py and nn/packed.py fill field by field, and the
   memory of a search. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __AVX2__
#include <immintrin.h>
#elif defined(__GNUC__)
#pragma GCC diagnostic ignored "-Wpsabi" /* vectors are passed within the library only */
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
  /* cells with allowed items in any part of the restriction, ascending; NULL: there are many */
  const int32_t *occupied;
  int64_t num_occupied;
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
  const int16_t *least_costs;   /* the least cost of the cells of each modality and first code */
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
  /* whole IDs: decoding ends once at most this many, or width, if larger, are under the beams;
     cells: about this many items are scanned at most */
  int64_t candidates;
  int64_t k; /* number of hits by codes, or the shortlist if embeddings are compared; 0: all */
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
  /* items that are scanned before cells are left out; fewer if few are allowed */
  int64_t first_rows;
} Request;

/* In a search of cells, until finish_hits(), the row is the position in table->items, and the beam
   is the cell. */
typedef struct {
  int64_t part, item, row, beam;
  float score, unused;
} Hit;

/* The result of one query. */
typedef struct {
  int64_t num_hits;
  int64_t num_ranked; /* items under the beams, or of the scanned cells */
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
  int64_t rows, below, num_children, num_keys, num_leaves, num_hits, num_ranked;
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
