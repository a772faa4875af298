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

/* Return the product of a query with a stored unit vector in half precision. It is divided by the
   vector's length, since rounding changes lengths by more than the products of near items differ. */
static float multiply_halves(const void *row, const float *query, int64_t n) {
  const uint16_t *halves = row;
  vec sums[2] = {0}, squares[2] = {0};
  int64_t i = 0;
  for (; i + 2 * LANES <= n; i += 2 * LANES)
    for (int j = 0; j < 2; j++) {
      vec numbers = halves_to_floats(halves + i + j * LANES);
      sums[j] += numbers * *(const vec *)(query + i + j * LANES);
      squares[j] += numbers * numbers;
    }
  float sum = sum_lanes(sums[0] + sums[1]), square = sum_lanes(squares[0] + squares[1]);
  for (; i < n; i++) {
    float number = half_to_float(halves[i]);
    sum += number * query[i];
    square += number * number;
  }
  return square > 0 ? sum / sqrtf(square) : 0;
}

static float dot(const float *x, const float *y, int64_t n) {
  vec sums[4] = {0};
  int64_t i = 0;
  for (; i + 4 * LANES <= n; i += 4 * LANES)
    for (int j = 0; j < 4; j++)
      sums[j] += *(const vec *)(x + i + j * LANES) * *(const vec *)(y + i + j * LANES);
  for (; i + LANES <= n; i += LANES) sums[0] += *(const vec *)(x + i) * *(const vec *)(y + i);
  float sum = sum_lanes(sums[0] + sums[1] + (sums[2] + sums[3]));
  for (; i < n; i++) sum += x[i] * y[i];
  return sum;
}

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
