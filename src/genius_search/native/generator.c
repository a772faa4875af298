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
