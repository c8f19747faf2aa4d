/* The decoder layers over a pack, forward and backward, for the learner on a CPU.

Groups do not attend to each other, so a thread takes complete groups from the first layer to the last, which keeps its data in
cache, and adds their weight gradients to a buffer of its own. The caller sums the buffers in thread order.

Shape letters: n tokens of a group, D hidden size, H/K query/KV heads, d head size, I MLP size, Q = (H + 2K) d columns of q, k
and v together. A segment is a prompt or a completion: T tokens that attend to L keys, A of the prompt and T of their own, both
padded. */

#include "vectors.h"

typedef struct {
    const float *input_norm, *post_attention_norm, *q_norm, *k_norm, *qkv_bias, *out_bias;
    const float *qkv, *out, *gate_up, *down;         /* packed, for x W^T */
    const float *qkv_t, *out_t, *gate_up_t, *down_t; /* packed, for dy W */
} BackboneLayer;

typedef struct {
    int64_t layers, D, H, K, d, I, tokens;
    float eps, head_eps, scale;
    const float *cos, *sin; /* [positions, d], with the first half of sin negated */
    const int64_t *position; /* [tokens] */
    const BackboneLayer *layer;
    float *saved; /* activations of every layer for the backward pass: see saved_of */
} Backbone;

/* A group's tokens are contiguous: its prompt, then its completions of these lengths. */
typedef struct { int64_t first, prompt, completions; const int64_t *length; } Group;

/* Saved activations of one layer, each [tokens, …]: input, projected q k v, normed and rotated q k, attention output, residual
stream after attention, gate and up; the reciprocal norms, and the log-sum-exps. */
typedef struct { float *x, *qkv, *rotated, *attended, *middle, *gate_up, *r_input, *r_post_attention, *r_heads, *lse; } Saved;

static int64_t columns(const Backbone *m) { return (m->H + 2 * m->K) * m->d; }

int64_t saved_size(const Backbone *m) { /* floats of one layer, with slack for tiles that read past the end */
    int64_t wide = m->D + columns(m) + (m->H + m->K) * m->d + m->H * m->d + m->D + 2 * m->I + 2 + (m->H + m->K) + m->H;
    return (m->tokens + MR) * wide;
}

static Saved saved_of(const Backbone *m, int64_t l, int64_t first) {
    float *at = m->saved + l * saved_size(m);
    Saved k;
#define FIELD(name, width) k.name = at + first * (width), at += (m->tokens + MR) * (width)
    FIELD(x, m->D);
    FIELD(qkv, columns(m));
    FIELD(rotated, (m->H + m->K) * m->d);
    FIELD(attended, m->H * m->d);
    FIELD(middle, m->D);
    FIELD(gate_up, 2 * m->I);
    FIELD(r_input, 1);
    FIELD(r_post_attention, 1);
    FIELD(r_heads, m->H + m->K);
    FIELD(lse, m->H);
    return k;
}

/* Scratch memory of a thread, sized for its longest group (rows) and longest segment. */
typedef struct {
    float *h, *dx, *dh, *dqkv, *dattended, *gate_up, *packed; /* [rows, …] */
    float *k_panels, *v_rows, *v_panels, *k_rows, *q_rows, *o_rows, *s, *ds;
} Scratch;

static int64_t segment_rows(const Group *groups, int64_t count) {
    int64_t longest = 0;
    for (int64_t g = 0; g < count; g++) {
        longest = groups[g].prompt > longest ? groups[g].prompt : longest;
        for (int64_t c = 0; c < groups[g].completions; c++)
            longest = groups[g].length[c] > longest ? groups[g].length[c] : longest;
    }
    return longest;
}

static int64_t tokens_of(const Group *group) {
    int64_t n = group->prompt;
    for (int64_t c = 0; c < group->completions; c++) n += group->length[c];
    return n;
}

static int allocate(const Backbone *m, const Group *groups, int64_t count, Scratch *w) {
    int64_t rows = 0, T = segment_rows(groups, count), L = 2 * padded(T), D = m->D, Q = columns(m), I = m->I, d = padded(m->d);
    for (int64_t g = 0; g < count; g++) rows = tokens_of(groups + g) > rows ? tokens_of(groups + g) : rows;
    rows += MR;
    int64_t widest = padded(2 * I) > padded(Q) ? padded(2 * I) : padded(Q);
    widest = padded(D) > widest ? padded(D) : widest;
    int64_t sizes[] = {rows * D, rows * D, rows * D, rows * Q, rows * m->H * m->d, rows * 2 * I, rows * widest,
                       L * d, L * d, L * d, L * d, (T + MR) * d, (T + MR) * d, (T + MR) * L, (T + MR) * L};
    float **fields = (float **)w;
    int ready = 1;
    for (int i = 0; i < 15; i++) ready &= (fields[i] = calloc((size_t)sizes[i], sizeof(float))) != 0;
    return ready;
}

static void release(Scratch *w) {
    for (int i = 0; i < 15; i++) free(((float **)w)[i]);
}

/* Attention probabilities of a segment's T queries (row length `ld`) in one head. Computes `lse`, or uses it if `known`. */
static void probabilities(int64_t T, int64_t A, int64_t L, int64_t d, const float *q, int64_t ld, const float *k_panels,
                          float scale, float *s, float *lse, int64_t by_lse, int known) {
    int64_t own = padded(A);
    multiply(T, d, L, q, ld, 1, k_panels, d, 0, 0, s, L);
    for (int64_t i = 0; i < T; i++) {
        float *row = s + i * L;
        for (int64_t j = 0; j < L; j += VL) *(vec *)(row + j) *= scale;
        for (int64_t j = A; j < own; j++) row[j] = -1e30f;
        for (int64_t j = own + i + 1; j < L; j++) row[j] = -1e30f;
        float top = known ? lse[i * by_lse] : max_of(row, L);
        float sum = (float)exp_all(row, L, top, 1.0f), by = known ? 1.0f : 1.0f / sum;
        if (!known) lse[i * by_lse] = top + logf(sum);
        for (int64_t j = 0; j < own + i + 1; j++) row[j] *= by;
        for (int64_t j = A; j < own; j++) row[j] = 0;
        for (int64_t j = own + i + 1; j < L; j++) row[j] = 0;
    }
}

typedef struct { int64_t start, T, A; } Segment; /* A: length of the prompt it attends to; 0: it is the prompt */

static Segment segment_of(const Group *group, int64_t number, int64_t start) {
    if (number == 0) return (Segment){0, group->prompt, 0};
    return (Segment){start, group->length[number - 1], group->prompt};
}

/* Keys (or values) of the prompt and of the segment, [L, d], as panels over the keys or over d, zero-padded between the two. */
static void gather(const float *x, int64_t ld, Segment at, int64_t d, float *panels, float *rows) {
    int64_t own = padded(at.A), L = own + padded(at.T);
    if (panels) {
        pack_any(x, d, at.A, 1, ld, d, panels);
        pack_any(x + at.start * ld, d, at.T, 1, ld, d, panels + own * d);
    }
    if (rows) {
        memset(rows, 0, (size_t)(L * padded(d)) * sizeof(float));
        pack_any(x, at.A, d, ld, 1, L, rows);
        pack_any(x + at.start * ld, at.T, d, ld, 1, L, rows + own * NR);
    }
}

static void attention(const Backbone *m, const Group *group, Saved *k, Scratch *w) {
    int64_t H = m->H, K = m->K, d = m->d, ldt = (H + K) * d, ldq = columns(m), start = 0;
    for (int64_t number = 0; number <= group->completions; number++) {
        Segment at = segment_of(group, number, start);
        start += at.T;
        int64_t L = padded(at.A) + padded(at.T);
        for (int64_t g = 0; g < K && at.T; g++) {
            gather(k->rotated + (H + g) * d, ldt, at, d, w->k_panels, 0);
            gather(k->qkv + (H + K + g) * d, ldq, at, d, 0, w->v_rows);
            for (int64_t h = g * (H / K); h < (g + 1) * (H / K); h++) {
                probabilities(at.T, at.A, L, d, k->rotated + at.start * ldt + h * d, ldt, w->k_panels, m->scale, w->s,
                           k->lse + at.start * H + h, H, 0);
                multiply(at.T, L, d, w->s, L, 1, w->v_rows, L, 0, 0, k->attended + at.start * H * d + h * d, H * d);
            }
        }
    }
}

/* With P the probabilities, O = P V and g its gradient: dV = P^T g, dS = P (g V^T - g·O) scale, dQ = dS K, dK = dS^T Q. */
static void attention_backward(const Backbone *m, const Group *group, Saved *k, Scratch *w) {
    int64_t H = m->H, K = m->K, d = m->d, ldt = (H + K) * d, ldq = columns(m), ldo = H * d, start = 0;
    for (int64_t number = 0; number <= group->completions; number++) {
        Segment at = segment_of(group, number, start);
        start += at.T;
        int64_t own = padded(at.A), L = own + padded(at.T);
        for (int64_t g = 0; g < K && at.T; g++) {
            gather(k->rotated + (H + g) * d, ldt, at, d, w->k_panels, w->k_rows);
            gather(k->qkv + (H + K + g) * d, ldq, at, d, w->v_panels, 0);
            float *dk = w->dqkv + (H + g) * d, *dv = w->dqkv + (H + K + g) * d;
            for (int64_t h = g * (H / K); h < (g + 1) * (H / K); h++) {
                const float *q = k->rotated + at.start * ldt + h * d, *grad = w->dattended + at.start * ldo + h * d;
                const float *out = k->attended + at.start * ldo + h * d;
                probabilities(at.T, at.A, L, d, q, ldt, w->k_panels, m->scale, w->s, k->lse + at.start * H + h, H, 1);
                multiply(at.T, d, L, grad, ldo, 1, w->v_panels, d, 0, 0, w->ds, L);
                for (int64_t i = 0; i < at.T; i++) {
                    float delta = dot(grad + i * ldo, out + i * ldo, d);
                    for (int64_t j = 0; j < L; j += VL) {
                        vec *ds = (vec *)(w->ds + i * L + j);
                        *ds = *(vec *)(w->s + i * L + j) * (*ds - delta) * m->scale;
                    }
                }
                multiply(at.T, L, d, w->ds, L, 1, w->k_rows, L, 0, 0, w->dqkv + at.start * ldq + h * d, ldq);
                pack_any(q, at.T, d, ldt, 1, at.T, w->q_rows);
                pack_any(grad, at.T, d, ldo, 1, at.T, w->o_rows);
                multiply(at.A, at.T, d, w->ds, 1, L, w->q_rows, at.T, 0, 1, dk, ldq);
                multiply(at.A, at.T, d, w->s, 1, L, w->o_rows, at.T, 0, 1, dv, ldq);
                multiply(at.T, at.T, d, w->ds + own, 1, L, w->q_rows, at.T, 0, 1, dk + at.start * ldq, ldq);
                multiply(at.T, at.T, d, w->s + own, 1, L, w->o_rows, at.T, 0, 1, dv + at.start * ldq, ldq);
            }
        }
    }
}

static void swiglu(const float *gate_up, int64_t n, int64_t I, float *out) {
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < I; j += VL) {
            vec gate = *(const vec *)(gate_up + i * 2 * I + j), up = *(const vec *)(gate_up + i * 2 * I + I + j);
            *(vec *)(out + i * I + j) = gate / (1.0f + exp_of(-gate)) * up;
        }
}

static void forward_group(const Backbone *m, const Group *group, const float *in, float *out, Scratch *w) {
    int64_t n = tokens_of(group), D = m->D, H = m->H, K = m->K, d = m->d, I = m->I, Q = columns(m);
    size_t stream = (size_t)(n * D) * sizeof(float);
    for (int64_t l = 0; l < m->layers; l++) {
        const BackboneLayer *layer = m->layer + l;
        Saved k = saved_of(m, l, group->first);
        float *next = l + 1 < m->layers ? saved_of(m, l + 1, group->first).x : out + group->first * D;
        if (!l) memcpy(k.x, in + group->first * D, stream);
        for (int64_t i = 0; i < n; i++) k.r_input[i] = rms_norm(k.x + i * D, layer->input_norm, D, m->eps, w->h + i * D);
        product(n, D, Q, w->h, D, layer->qkv, layer->qkv_bias, 0, k.qkv, Q);
        for (int64_t i = 0; i < n; i++) {
            const float *cos = m->cos + m->position[group->first + i] * d, *sin = m->sin + m->position[group->first + i] * d;
            for (int64_t g = 0; g < H + K; g++) {
                const float *from = k.qkv + i * Q + g * d, *weight = g < H ? layer->q_norm : layer->k_norm;
                float *to = k.rotated + (i * (H + K) + g) * d;
                if (weight)
                    k.r_heads[i * (H + K) + g] = rms_norm(from, weight, d, m->head_eps, to);
                else
                    memcpy(to, from, (size_t)d * sizeof(float));
                rotate(to, cos, sin, d);
            }
        }
        attention(m, group, &k, w);
        memcpy(k.middle, k.x, stream);
        product(n, H * d, D, k.attended, H * d, layer->out, layer->out_bias, 1, k.middle, D);
        for (int64_t i = 0; i < n; i++)
            k.r_post_attention[i] = rms_norm(k.middle + i * D, layer->post_attention_norm, D, m->eps, w->h + i * D);
        product(n, D, 2 * I, w->h, D, layer->gate_up, 0, 0, k.gate_up, 2 * I);
        swiglu(k.gate_up, n, I, w->gate_up);
        memcpy(next, k.middle, stream);
        product(n, I, D, w->gate_up, I, layer->down, 0, 1, next, D);
    }
}

/* grad [M, N] += a^T b over n tokens; a: [n, M], b: [n, N]. */
static void weight_gradient(int64_t n, int64_t M, int64_t N, const float *a, const float *b, int64_t ldb, float *packed,
                            float *grad) {
    pack_any(b, n, N, ldb, 1, n, packed);
    multiply(M, n, N, a, 1, M, packed, n, 0, 1, grad, N);
}

static void add_rows(const float *x, int64_t n, int64_t width, float *sum) {
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < width; j++) sum[j] += x[i * width + j];
}

/* y = w x r, r = (mean x^2 + eps)^-1/2: dx = r (g w - xr mean(g w xr)), dw = g xr. Writes dx, or adds to it if `add`. */
INLINE void rms_norm_backward(const float *x, float r, const float *w, const float *g, int64_t n, int add, float *dx,
                              float *dw) {
    vec sum = {0};
    for (int64_t i = 0; i < n; i += VL) {
        vec normal = *(const vec *)(x + i) * r, grad = *(const vec *)(g + i);
        *(vec *)(dw + i) += grad * normal;
        sum += grad * *(const vec *)(w + i) * normal;
    }
    float mean = sum_of(sum) / (float)n;
    for (int64_t i = 0; i < n; i += VL) {
        vec dy = (*(const vec *)(g + i) * *(const vec *)(w + i) - *(const vec *)(x + i) * r * mean) * r;
        *(vec *)(dx + i) = add ? *(vec *)(dx + i) + dy : dy;
    }
}

static void recompute_norms(const float *x, const float *r, const float *w, int64_t n, int64_t D, float *out) {
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < D; j += VL)
            *(vec *)(out + i * D + j) = *(const vec *)(x + i * D + j) * r[i] * *(const vec *)(w + j);
}

/* A layer's gradients are stored in this order; c_backbone.py splits them. */
typedef struct {
    float *input_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *out, *out_bias, *post_attention_norm, *gate_up, *down;
} Gradients;

int64_t gradient_size(const Backbone *m) {
    int64_t D = m->D, Q = columns(m);
    return D + Q * D + Q + 2 * m->d + D * m->H * m->d + D + D + 2 * m->I * D + D * m->I;
}

static Gradients gradients_of(const Backbone *m, int64_t l, float *at) {
    int64_t D = m->D, Q = columns(m);
    at += l * gradient_size(m);
    Gradients g;
    g.input_norm = at, at += D;
    g.qkv = at, at += Q * D;
    g.qkv_bias = at, at += Q;
    g.q_norm = at, at += m->d;
    g.k_norm = at, at += m->d;
    g.out = at, at += D * m->H * m->d;
    g.out_bias = at, at += D;
    g.post_attention_norm = at, at += D;
    g.gate_up = at, at += 2 * m->I * D;
    g.down = at;
    return g;
}

static void swiglu_backward(const float *gate_up, const float *g, int64_t n, int64_t I, float *out) {
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < I; j += VL) {
            vec gate = *(const vec *)(gate_up + i * 2 * I + j), up = *(const vec *)(gate_up + i * 2 * I + I + j);
            vec grad = *(const vec *)(g + i * I + j), s = 1.0f / (1.0f + exp_of(-gate));
            *(vec *)(out + i * 2 * I + j) = grad * up * s * (1.0f + gate * (1.0f - s));
            *(vec *)(out + i * 2 * I + I + j) = grad * gate * s;
        }
}

/* Gradients of projected q and k from those of normed and rotated q and k, in place. */
static void heads_backward(const Backbone *m, const Group *group, const BackboneLayer *layer, Saved *k, Gradients *G,
                           Scratch *w) {
    int64_t n = tokens_of(group), H = m->H, K = m->K, d = m->d, Q = columns(m);
    float unrotated[d + MR];
    for (int64_t i = 0; i < n; i++) {
        const float *cos = m->cos + m->position[group->first + i] * d, *sin = m->sin + m->position[group->first + i] * d;
        for (int64_t g = 0; g < H + K; g++) {
            float *grad = w->dqkv + i * Q + g * d;
            const float *weight = g < H ? layer->q_norm : layer->k_norm;
            for (int64_t j = 0; j < d / 2; j++) {
                unrotated[j] = grad[j] * cos[j] + grad[j + d / 2] * sin[j + d / 2];
                unrotated[j + d / 2] = grad[j + d / 2] * cos[j + d / 2] + grad[j] * sin[j];
            }
            if (weight)
                rms_norm_backward(k->qkv + i * Q + g * d, k->r_heads[i * (H + K) + g], weight, unrotated, d, 0, grad,
                              g < H ? G->q_norm : G->k_norm);
            else
                memcpy(grad, unrotated, (size_t)d * sizeof(float));
        }
    }
}

static void backward_group(const Backbone *m, const Group *group, const float *grad_out, float *grad_in, float *gradients,
                           Scratch *w) {
    int64_t n = tokens_of(group), D = m->D, H = m->H, d = m->d, I = m->I, Q = columns(m);
    size_t stream = (size_t)(n * D) * sizeof(float);
    memcpy(w->dx, grad_out + group->first * D, stream);
    for (int64_t l = m->layers - 1; l >= 0; l--) {
        const BackboneLayer *layer = m->layer + l;
        Saved k = saved_of(m, l, group->first);
        Gradients G = gradients_of(m, l, gradients);
        swiglu(k.gate_up, n, I, w->gate_up);
        weight_gradient(n, D, I, w->dx, w->gate_up, I, w->packed, G.down);
        float *dswiglu = w->packed; /* no longer needed, and wide enough */
        product(n, D, I, w->dx, D, layer->down_t, 0, 0, dswiglu, I);
        swiglu_backward(k.gate_up, dswiglu, n, I, w->gate_up);
        recompute_norms(k.middle, k.r_post_attention, layer->post_attention_norm, n, D, w->h);
        weight_gradient(n, 2 * I, D, w->gate_up, w->h, D, w->packed, G.gate_up);
        product(n, 2 * I, D, w->gate_up, 2 * I, layer->gate_up_t, 0, 0, w->dh, D);
        for (int64_t i = 0; i < n; i++)
            rms_norm_backward(k.middle + i * D, k.r_post_attention[i], layer->post_attention_norm, w->dh + i * D, D, 1,
                              w->dx + i * D, G.post_attention_norm);
        weight_gradient(n, D, H * d, w->dx, k.attended, H * d, w->packed, G.out);
        if (layer->out_bias) add_rows(w->dx, n, D, G.out_bias);
        product(n, D, H * d, w->dx, D, layer->out_t, 0, 0, w->dattended, H * d);
        memset(w->dqkv, 0, (size_t)(n * Q) * sizeof(float));
        attention_backward(m, group, &k, w);
        heads_backward(m, group, layer, &k, &G, w);
        recompute_norms(k.x, k.r_input, layer->input_norm, n, D, w->h);
        weight_gradient(n, Q, D, w->dqkv, w->h, D, w->packed, G.qkv);
        if (layer->qkv_bias) add_rows(w->dqkv, n, Q, G.qkv_bias);
        product(n, Q, D, w->dqkv, Q, layer->qkv_t, 0, 0, w->dh, D);
        for (int64_t i = 0; i < n; i++)
            rms_norm_backward(k.x + i * D, k.r_input[i], layer->input_norm, w->dh + i * D, D, 1, w->dx + i * D, G.input_norm);
    }
    memcpy(grad_in + group->first * D, w->dx, stream);
}

/* Run some groups through all layers: in, out [tokens, D]. Returns 0, or 1 if memory could not be allocated. */
int forward(const Backbone *m, const Group *groups, int64_t count, const float *in, float *out) {
    Scratch w;
    int ready = allocate(m, groups, count, &w);
    for (int64_t g = 0; g < count && ready; g++) forward_group(m, groups + g, in, out, &w);
    release(&w);
    return !ready;
}

/* The backward pass; adds to `gradients`, [layers, gradient_size], which is the calling thread's own. */
int backward(const Backbone *m, const Group *groups, int64_t count, const float *grad_out, float *grad_in, float *gradients) {
    Scratch w;
    int ready = allocate(m, groups, count, &w);
    for (int64_t g = 0; g < count && ready; g++) backward_group(m, groups + g, grad_out, grad_in, gradients, &w);
    release(&w);
    return !ready;
}
