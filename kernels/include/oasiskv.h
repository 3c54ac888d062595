/* The C ABI of OasisKV's native kernels. The CPU and the CUDA library export the same functions.
 *
 * One op is one struct of arguments and one function. What an op computes is said by its reference in oasiskv/ops/reference.py,
 * reference_step.py and reference_summaries.py; this file says how its arguments travel. oasiskv/ops/_abi.py is generated from it
 * (kernels/generate_bindings.py), which reads the structs below line by line: one field per line, of the types used here.
 *
 * Shapes: S sequences, R query rows, Hq query heads, H kv heads, D head_dim, B block_size, P places, N blocks. Tensors are dense in
 * the order written beside them; a `..._stride` counts elements and replaces the dense stride of the dimension that it names, so that
 * queries, keys and values may be views. Their last dimension is always dense. Nothing needs more alignment than its element.
 *
 * Rules that hold for every op:
 * - The caller owns all memory. Outputs are written in full, whatever they hold before.
 * - A size may be 0; then the pointers of what is empty are not read.
 * - Table entries are OASIS_EMPTY or within their range. The CPU library refuses others with OASIS_OUT_OF_RANGE before it reads or
 *   writes any tensor that a table points into. The CUDA library cannot look without waiting for the device: it treats them as EMPTY.
 * - `stream` is a cudaStream_t. The CPU library ignores it.
 * - `scratch` is memory for intermediate results, `scratch_bytes` long, at least what oasis_scratch_bytes says, aligned to 256. The
 *   CUDA library allocates nothing. The CPU library needs none and keeps what it needs per thread.
 * - `num_threads` bounds the threads that a CPU kernel may use. The CUDA library ignores it.
 */
#ifndef OASISKV_H
#define OASISKV_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define OASIS_API __declspec(dllexport)
#else
#define OASIS_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define OASIS_ABI_VERSION 6
#define OASIS_EMPTY (-1)

enum oasis_status {
    OASIS_OK = 0,
    OASIS_INVALID = 1,      /* sizes, strides or a dtype that make no sense; the message names them */
    OASIS_OUT_OF_RANGE = 2, /* a table entry that points nowhere */
    OASIS_UNSUPPORTED = 3,  /* sensible, but this library has no code for it: the caller may use the reference */
    OASIS_FAILED = 4        /* memory, driver or device */
};

enum oasis_dtype {
    OASIS_FLOAT32 = 0,
    OASIS_BFLOAT16 = 1,
    OASIS_FLOAT16 = 2
};

enum oasis_op {
    OASIS_APPEND_ROWS = 0,
    OASIS_COPY_BLOCKS = 1,
    OASIS_PAGED_ATTENTION = 2,
    OASIS_EXACT_LOGITS = 3,
    OASIS_BLOCK_MASS = 4,
    OASIS_TOP_MISSING = 5,
    OASIS_SELECT = 6,
    OASIS_EXCHANGE_SLOTS = 7,
    OASIS_MINMAX_WRITE = 8,
    OASIS_MINMAX_SCORE = 9,
    OASIS_MINMAX4_WRITE = 10,
    OASIS_MINMAX4_READ = 11,
    OASIS_BIT2_WRITE = 12,
    OASIS_BIT2_SCORE = 13,
    OASIS_TRANSFORM_WRITE = 14,
    OASIS_TRANSFORM_SCORE = 15,
    OASIS_READ_SLOTS = 16,
    OASIS_CORRECTED_ATTENTION = 17,
    OASIS_MARK_PLACES = 18,
    OASIS_LOAD_BLOCKS = 19,
    OASIS_PUBLISH_BLOCKS = 20,
    OASIS_GUESS_QUERIES = 21,
    OASIS_LEARN_ERRORS = 22
};

typedef struct {
    void *pool;             /* (num_slots, 2, B, D), written */
    const void *keys;       /* (num_tokens, H, D) */
    const void *values;     /* (num_tokens, H, D) */
    const int64_t *slots;   /* (num_tokens, H) */
    const int64_t *offsets; /* (num_tokens,), below B */
    int64_t num_slots;
    int64_t num_tokens;
    int64_t kv_heads;
    int64_t block_size;
    int64_t head_dim;
    int64_t keys_token_stride;
    int64_t keys_head_stride;
    int64_t values_token_stride;
    int64_t values_head_stride;
    int64_t element_bytes;
    int64_t num_threads;
    void *stream;
} oasis_append_rows_args;

typedef struct {
    const void *source;          /* slots of slot_bytes; host memory that the device can read, for CUDA */
    void *target;                /* may be the source if no slot is both read and written, else OASIS_UNSUPPORTED (CPU) */
    const int64_t *source_slots; /* (num_pairs,); a pair with an EMPTY side is left out */
    const int64_t *target_slots; /* (num_pairs,), none twice */
    int64_t num_pairs;
    int64_t num_source_slots;
    int64_t num_target_slots;
    int64_t slot_bytes;
    int64_t num_threads;
    void *stream;
} oasis_copy_blocks_args;

typedef struct {
    const void *queries;         /* (S, R, Hq, D) */
    const void *pool;            /* (num_slots, 2, B, D) */
    const int64_t *slots;        /* (S, H, P); an entry with an EMPTY slot or block is left out */
    const int64_t *blocks;       /* (S, H, P) */
    const void *arena;           /* (num_arena_slots, 2, B, D), or null with arena_places 0 */
    const int64_t *arena_slots;  /* (S, H, arena_places) */
    const int64_t *arena_blocks; /* (S, H, arena_places) */
    const int64_t *positions;    /* (S, R), below 0 for padding rows */
    void *output;                /* (S, R, Hq, D) */
    float *logsumexp;            /* (S, R, Hq) */
    int64_t sequences;
    int64_t rows;
    int64_t query_heads;
    int64_t kv_heads;
    int64_t head_dim;
    int64_t block_size;
    int64_t places;
    int64_t arena_places;
    int64_t num_slots;
    int64_t num_arena_slots;
    int64_t queries_sequence_stride;
    int64_t queries_row_stride;
    int64_t queries_head_stride;
    int64_t dtype; /* of queries, pool, arena and output */
    int64_t num_threads;
    void *stream;
    void *scratch;
    int64_t scratch_bytes;
    float scale;
    float softcap; /* above 0: a logit x becomes softcap * tanh(x / softcap); 0: it stays as it is */
} oasis_paged_attention_args;

typedef struct {
    const void *queries;  /* (S, R, Hq, D) */
    const void *arena;    /* (num_pages * H, 2, B, D) */
    const int64_t *pages; /* (S, N) */
    float *logits;        /* (S, R, Hq, N); those of EMPTY pages are -inf */
    int64_t sequences;
    int64_t rows;
    int64_t query_heads;
    int64_t kv_heads;
    int64_t head_dim;
    int64_t block_size;
    int64_t blocks;
    int64_t num_pages;
    int64_t queries_sequence_stride;
    int64_t queries_row_stride;
    int64_t queries_head_stride;
    int64_t dtype; /* of queries and arena */
    int64_t num_threads;
    void *stream;
    void *scratch;
    int64_t scratch_bytes;
    float scale;
    float softcap; /* of the tokens' logits, as in paged_attention */
} oasis_exact_logits_args;

typedef struct {
    const float *logits;       /* (S, R, Hq, N) */
    const int64_t *num_blocks; /* (S,) */
    float *mass;               /* (S, R, H, N) */
    int64_t sequences;
    int64_t rows;
    int64_t query_heads;
    int64_t kv_heads;
    int64_t blocks;
    int64_t num_threads;
    void *stream;
    void *scratch;
    int64_t scratch_bytes;
} oasis_block_mass_args;

typedef struct {
    const float *mass;       /* (S, H, N) */
    const int64_t *resident; /* (S, H, C); entries outside the blocks are ignored */
    const int64_t *low;      /* (S,) */
    const int64_t *high;     /* (S,) */
    int64_t *best_blocks;    /* (S, H, count) */
    float *best_mass;        /* (S, H, count) */
    int64_t sequences;
    int64_t kv_heads;
    int64_t blocks;
    int64_t places;
    int64_t count; /* at most N */
    int64_t num_threads;
    void *stream;
    void *scratch;
    int64_t scratch_bytes;
} oasis_top_missing_args;

typedef struct {
    const float *mass;          /* (S, H, N) */
    const int64_t *resident;    /* (S, H, C); entries outside the blocks are ignored */
    const int64_t *selected_at; /* (S, H, C) */
    const int64_t *low;         /* (S,) */
    const int64_t *high;        /* (S,) */
    const float *floor;         /* (S,), at least 0, or -1 for none */
    int64_t *swap_places;       /* (S, H, swaps) */
    int64_t *swap_blocks;       /* (S, H, swaps) */
    int64_t *kept;              /* (S, H, C) */
    int64_t *new_selected_at;   /* (S, H, C) */
    int64_t *counts;            /* (S, 2) */
    int64_t sequences;
    int64_t kv_heads;
    int64_t blocks;
    int64_t places;
    int64_t swaps; /* min(max_new, N, C) */
    int64_t pooled;
    int64_t step;
    int64_t num_threads;
    void *stream;
    void *scratch;
    int64_t scratch_bytes;
    float margin;
    float keep;
} oasis_select_args;

typedef struct {
    int64_t *slots;          /* (table_rows, H, C), written */
    int64_t *free_slots;     /* (table_rows, F), written: a stack per row */
    int64_t *free_count;     /* (table_rows,), written: how many of the stack are in use, F at most */
    const int64_t *rows;     /* (S,), none twice */
    const int64_t *kept;     /* (S, H, C) */
    const int64_t *places;   /* (S, H, K) */
    int64_t *granted;        /* (S, H, K) */
    int64_t table_rows;
    int64_t capacity; /* F */
    int64_t sequences;
    int64_t kv_heads;
    int64_t places_per_head; /* C */
    int64_t swaps;           /* K */
    int64_t num_threads;
    void *stream;
} oasis_exchange_slots_args;

typedef struct {
    void *bounds;         /* (num_pages, H, 2, D), written */
    const int64_t *pages; /* (count,), none twice */
    const void *keys;     /* (count, H, B, D) */
    int64_t count;
    int64_t num_pages;
    int64_t kv_heads;
    int64_t block_size;
    int64_t head_dim;
    int64_t keys_block_stride;
    int64_t keys_head_stride;
    int64_t keys_token_stride;
    int64_t dtype; /* of keys and bounds */
    int64_t num_threads;
    void *stream;
} oasis_minmax_write_args;

typedef struct {
    const void *bounds;   /* (num_pages, H, 2, D) */
    const int64_t *pages; /* (S, N); logits of EMPTY pages are meaningless */
    const void *queries;  /* (S, R, Hq, D) */
    float *logits;        /* (S, R, Hq, N) */
    int64_t sequences;
    int64_t rows;
    int64_t query_heads;
    int64_t kv_heads;
    int64_t head_dim;
    int64_t blocks;
    int64_t num_pages;
    int64_t queries_sequence_stride;
    int64_t queries_row_stride;
    int64_t queries_head_stride;
    int64_t queries_dtype;
    int64_t bounds_dtype;
    int64_t num_threads;
    void *stream;
    void *scratch;
    int64_t scratch_bytes;
    float scale;
} oasis_minmax_score_args;

typedef struct {
    uint8_t *codes;       /* (num_pages, H, 2, D / 2), written */
    void *ranges;         /* (num_pages, H, 2, 2) fp16, written */
    const int64_t *pages; /* (count,), none twice */
    const void *keys;     /* (count, H, B, D) */
    int64_t count;
    int64_t num_pages;
    int64_t kv_heads;
    int64_t block_size;
    int64_t head_dim;
    int64_t keys_block_stride;
    int64_t keys_head_stride;
    int64_t keys_token_stride;
    int64_t dtype; /* of keys */
    int64_t outward;
    int64_t num_threads;
    void *stream;
} oasis_minmax4_write_args;

typedef struct {
    const uint8_t *codes; /* (num_rows, inner, 2, D / 2) */
    const void *ranges;   /* (num_rows, inner, 2, 2) fp16 */
    const int64_t *rows;  /* (count,); bounds of EMPTY rows are meaningless */
    float *bounds;        /* (count, inner, 2, D) */
    int64_t count;
    int64_t num_rows;
    int64_t inner; /* kv heads where a row is a page, 1 where it is a slot */
    int64_t head_dim;
    int64_t num_threads;
    void *stream;
} oasis_minmax4_read_args;

typedef struct {
    uint8_t *codes;       /* (num_pages, H, B, D / 4), written */
    const int64_t *pages; /* (count,), none twice */
    const void *keys;     /* (count, H, B, D) */
    const float *bounds;  /* (count, H, 2, D) */
    int64_t count;
    int64_t num_pages;
    int64_t kv_heads;
    int64_t block_size;
    int64_t head_dim;
    int64_t keys_block_stride;
    int64_t keys_head_stride;
    int64_t keys_token_stride;
    int64_t dtype; /* of keys */
    int64_t num_threads;
    void *stream;
} oasis_bit2_write_args;

typedef struct {
    const uint8_t *codes; /* (num_slots, B, D / 4) */
    const int64_t *slots; /* (S, H, N); logits of EMPTY slots are meaningless */
    const float *bounds;  /* (S, H, N, 2, D) */
    const void *queries;  /* (S, R, Hq, D) */
    float *logits;        /* (S, R, Hq, N) */
    int64_t sequences;
    int64_t rows;
    int64_t query_heads;
    int64_t kv_heads;
    int64_t head_dim;
    int64_t block_size;
    int64_t blocks;
    int64_t num_slots;
    int64_t queries_sequence_stride;
    int64_t queries_row_stride;
    int64_t queries_head_stride;
    int64_t dtype; /* of queries */
    int64_t num_threads;
    void *stream;
    void *scratch;
    int64_t scratch_bytes;
    float scale;
} oasis_bit2_score_args;

typedef struct {
    uint8_t *codes;          /* (num_pages, M, B / 2), written */
    const int64_t *pages;    /* (count,), none twice */
    const void *keys;        /* (count, H, B, D) */
    const float *mean;       /* (H, D) */
    const float *encode;     /* (H, D, C) */
    const float *thresholds; /* (H, C, 15), ascending, padded with +inf */
    const int64_t *nibbles;  /* (H, C), below M */
    const int64_t *shifts;   /* (H, C), 0 to 3 */
    int64_t count;
    int64_t num_pages;
    int64_t num_nibbles; /* M */
    int64_t components;  /* C */
    int64_t kv_heads;
    int64_t block_size;
    int64_t head_dim;
    int64_t keys_block_stride;
    int64_t keys_head_stride;
    int64_t keys_token_stride;
    int64_t dtype; /* of keys */
    int64_t num_threads;
    void *stream;
    void *scratch;
    int64_t scratch_bytes;
} oasis_transform_write_args;

typedef struct {
    const uint8_t *codes;      /* (num_pages, M, B / 2) */
    const int64_t *pages;      /* (S, N); logits of EMPTY pages are meaningless */
    const void *queries;       /* (S, R, Hq, D) */
    const float *mean;         /* (H, D) */
    const float *decode;       /* (H, C, D) */
    const float *levels;       /* (M, 16, 4) */
    const int64_t *components; /* (M, 4), below H * C */
    const int64_t *offsets;    /* (H,): the first nibble of each head, ascending; a head ends where the next begins */
    float *logits;             /* (S, R, Hq, N) */
    int64_t sequences;
    int64_t rows;
    int64_t query_heads;
    int64_t kv_heads;
    int64_t head_dim;
    int64_t block_size; /* OASIS_UNSUPPORTED above 64 (CPU) */
    int64_t blocks;
    int64_t num_pages;
    int64_t num_nibbles;    /* M */
    int64_t num_components; /* C */
    int64_t queries_sequence_stride;
    int64_t queries_row_stride;
    int64_t queries_head_stride;
    int64_t dtype; /* of queries */
    int64_t num_threads;
    void *stream;
    void *scratch;
    int64_t scratch_bytes;
    float scale;
} oasis_transform_score_args;

/* No op of the library: reads whole slots in the order of a table and does nothing with them. It is what benchmarks compare with. */
typedef struct {
    const void *pool;     /* (num_slots, slot_bytes); slot_bytes a multiple of 64 */
    const int64_t *slots; /* (count,) */
    float *sum;           /* (1,): of what was read, so that reading cannot be left out */
    int64_t count;
    int64_t num_slots;
    int64_t slot_bytes;
    int64_t num_threads;
    void *stream;
} oasis_read_slots_args;

/* Each returns an oasis_status. What went wrong is in oasis_last_error() of the same thread until its next call. */
/* A layer's step in one call; M sparse sequences among S, T table rows. */
typedef struct {
    const void *queries;           /* (S, R, Hq, D) */
    const void *pool;              /* (num_slots, 2, B, D) */
    const int64_t *slots;          /* (S, H, P); an entry with an EMPTY slot or block is left out */
    const int64_t *blocks;         /* (S, H, P) */
    const void *arena;             /* (num_arena_slots, 2, B, D) */
    const int64_t *arena_slots;    /* (M, H, N), EMPTY for a block that is not there */
    const float *logits;           /* (M, R, Hq, N) */
    const int64_t *num_blocks;     /* (M,) */
    const int64_t *members;        /* (M,), which of the S sequences, none twice */
    const int64_t *table_rows;     /* (M,), which rows of the next two */
    const int64_t *selected;       /* (T, H, C) */
    const int64_t *selected_slots; /* (T, H, C) */
    const int64_t *low;            /* (M,) */
    const int64_t *high;           /* (M,) */
    const float *weights;          /* (M, R) */
    const int64_t *positions;      /* (S, R), below 0 for padding rows */
    void *output;                  /* (S, R, Hq, D) */
    float *counts;                 /* (3,) */
    int64_t sequences;
    int64_t sparse_sequences;
    int64_t rows;
    int64_t query_heads;
    int64_t kv_heads;
    int64_t head_dim;
    int64_t block_size;
    int64_t places;
    int64_t selected_places; /* C */
    int64_t num_table_rows;  /* T */
    int64_t num_sealed;      /* N */
    int64_t num_slots;
    int64_t num_arena_slots;
    int64_t per_row;
    int64_t queries_sequence_stride;
    int64_t queries_row_stride;
    int64_t queries_head_stride;
    int64_t dtype; /* of queries, pool, arena and output */
    int64_t num_threads;
    void *stream;
    float least_gain;
    float scale;
    float softcap; /* as in paged_attention; `logits` are what they are */
} oasis_corrected_attention_args;

typedef struct {
    int64_t *blocks;           /* (T, H, C), written */
    const int64_t *slots;      /* (T, H, C) */
    const int64_t *table_rows; /* (S,), none twice */
    const int64_t *kept;       /* (S, H, C) */
    const int64_t *places;     /* (S, H, K) */
    int64_t *filled;           /* (S, H, K) */
    int64_t num_table_rows;    /* T */
    int64_t sequences;
    int64_t kv_heads;
    int64_t places_per_head; /* C */
    int64_t swaps;           /* K */
    int64_t num_threads;
    void *stream;
} oasis_mark_places_args;

typedef struct {
    const void *arena;          /* num_arena_slots of slot_bytes */
    void *pool;                 /* num_slots of them, written; shares no memory with the arena */
    const int64_t *arena_slots; /* (S, H, N), EMPTY for a block that is not there */
    const int64_t *blocks;      /* (S, H, K), below N */
    const int64_t *slots;       /* (S, H, K), none twice; a pair with an EMPTY side is left out */
    int64_t *counts;            /* (S, 2) */
    int64_t sequences;
    int64_t kv_heads;
    int64_t num_sealed; /* N */
    int64_t swaps;      /* K */
    int64_t num_arena_slots;
    int64_t num_slots;
    int64_t slot_bytes;
    int64_t num_threads;
    void *stream;
} oasis_load_blocks_args;

typedef struct {
    int64_t *blocks;           /* (T, H, C), written */
    int64_t *selected_at;      /* (T, H, C), written */
    const int64_t *table_rows; /* (S,), none twice */
    const int64_t *kept;       /* (S, H, C) */
    const int64_t *places;     /* (S, H, K) */
    const int64_t *new_blocks; /* (S, H, K) */
    const int64_t *stamps;     /* (S, H, C) */
    int64_t num_table_rows;    /* T */
    int64_t sequences;
    int64_t kv_heads;
    int64_t places_per_head; /* C */
    int64_t swaps;           /* K */
    int64_t num_threads;
    void *stream;
} oasis_publish_blocks_args;

typedef struct {
    const float *raw;          /* (S, R, Hq, D) */
    const float *errors;       /* (T, Hq, D) */
    const int64_t *table_rows; /* (S,) */
    const float *turns;        /* (S, R, 2, planes): cosines, then sines */
    float *queries;            /* (S, R, Hq, D) */
    int64_t num_table_rows;    /* T */
    int64_t sequences;
    int64_t rows;
    int64_t query_heads;
    int64_t head_dim;
    int64_t planes; /* at most D / 2 */
    int64_t num_threads;
    void *stream;
} oasis_guess_queries_args;

typedef struct {
    float *errors;                    /* (T, Hq, D), written */
    const int64_t *table_rows;        /* (S,), none twice */
    const float *queries;             /* (S, R, Hq, D) */
    const float *guessed;             /* (S, R, Hq, D), before rotation */
    const float *turns;               /* (S, R, 2, planes) */
    const int64_t *positions;         /* (S, R) */
    const int64_t *guessed_positions; /* (S, R) */
    int64_t num_table_rows;           /* T */
    int64_t sequences;
    int64_t rows;
    int64_t query_heads;
    int64_t head_dim;
    int64_t planes; /* at most D / 2 */
    int64_t queries_sequence_stride;
    int64_t queries_head_stride;
    int64_t num_threads;
    void *stream;
    float scaling;
    float keep;
} oasis_learn_errors_args;

OASIS_API int32_t oasis_append_rows(const oasis_append_rows_args *args);
OASIS_API int32_t oasis_copy_blocks(const oasis_copy_blocks_args *args);
OASIS_API int32_t oasis_paged_attention(const oasis_paged_attention_args *args);
OASIS_API int32_t oasis_exact_logits(const oasis_exact_logits_args *args);
OASIS_API int32_t oasis_block_mass(const oasis_block_mass_args *args);
OASIS_API int32_t oasis_top_missing(const oasis_top_missing_args *args);
OASIS_API int32_t oasis_select(const oasis_select_args *args);
OASIS_API int32_t oasis_exchange_slots(const oasis_exchange_slots_args *args);
OASIS_API int32_t oasis_minmax_write(const oasis_minmax_write_args *args);
OASIS_API int32_t oasis_minmax_score(const oasis_minmax_score_args *args);
OASIS_API int32_t oasis_minmax4_write(const oasis_minmax4_write_args *args);
OASIS_API int32_t oasis_minmax4_read(const oasis_minmax4_read_args *args);
OASIS_API int32_t oasis_bit2_write(const oasis_bit2_write_args *args);
OASIS_API int32_t oasis_bit2_score(const oasis_bit2_score_args *args);
OASIS_API int32_t oasis_transform_write(const oasis_transform_write_args *args);
OASIS_API int32_t oasis_transform_score(const oasis_transform_score_args *args);
OASIS_API int32_t oasis_read_slots(const oasis_read_slots_args *args);
OASIS_API int32_t oasis_corrected_attention(const oasis_corrected_attention_args *args);
OASIS_API int32_t oasis_mark_places(const oasis_mark_places_args *args);
OASIS_API int32_t oasis_load_blocks(const oasis_load_blocks_args *args);
OASIS_API int32_t oasis_publish_blocks(const oasis_publish_blocks_args *args);
OASIS_API int32_t oasis_guess_queries(const oasis_guess_queries_args *args);
OASIS_API int32_t oasis_learn_errors(const oasis_learn_errors_args *args);

OASIS_API int32_t oasis_abi_version(void);

/* sizeof the args struct of an oasis_op, or 0 where this library has no such op: the caller uses the reference for it. */
OASIS_API size_t oasis_struct_size(int32_t op);

/* Scratch that a call with these arguments needs, or -1 for an unknown op. `scratch` and `scratch_bytes` themselves are not read. */
OASIS_API int64_t oasis_scratch_bytes(int32_t op, const void *args);

OASIS_API const char *oasis_last_error(void);

/* One line: compiler, code paths that were built, and the one that runs here. */
OASIS_API const char *oasis_build_info(void);

/* Run another code path of the CPU library from now on: "portable", "avx2", "avx512", "avx512bf16", or "auto". For tests.
 * OASIS_UNSUPPORTED if it was not built or this processor cannot run it. */
OASIS_API int32_t oasis_set_isa(const char *name);

#ifdef __cplusplus
}
#endif

#endif
