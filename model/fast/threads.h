/* Threads of a step: the caller and its helpers claim pieces of a task by an atomic counter.
 *
 * Beside another program a helper may lose its core for milliseconds. The caller waits for pieces
 * that a helper has claimed, never for one that has not begun; without any it does all pieces
 * itself. Who does a piece does not change its bits. */

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#define INLINE static inline __attribute__((always_inline))
INLINE long least(long a, long b) { return a < b ? a : b; }
INLINE long most(long a, long b) { return a > b ? a : b; }

typedef void Task(void *argument, long piece);
enum { AWAKE = 2000, PATIENCE = 6000 }; /* looks for work before a thread yields, and sleeps */

static struct {
    _Alignas(64) atomic_long unclaimed; /* pieces; 0 or less if there is none */
    _Alignas(64) atomic_long done;      /* by helpers */
    _Alignas(64) atomic_long helpers, share;
    Task *task; /* this and the next two stay until all claimed pieces are done */
    void *argument;
    long pieces, started, steps;
    pthread_mutex_t lock;
    pthread_cond_t begun;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .begun = PTHREAD_COND_INITIALIZER};

static long work(void) { /* claims pieces until none is left, and does them: their number */
    long done = 0, unclaimed;
    while ((unclaimed = pool.unclaimed) > 0) {
        long share = most(pool.share, unclaimed / (2 * (pool.helpers + 1)));
        long left = atomic_fetch_sub(&pool.unclaimed, share), taken = most(0, least(share, left));
        for (long piece = 0; piece < taken; piece++)
            pool.task(pool.argument, pool.pieces - left + piece);
        done += taken;
    }
    return done;
}

static void *help(void *number) {
    for (long seen = 0;;) {
        for (long looks = 0; looks < PATIENCE; looks++) {
            long done = (long)number < pool.helpers ? work() : 0;
            if (done) {
                atomic_fetch_add(&pool.done, done);
                looks = 0;
            } else if (looks > AWAKE)
                sched_yield();
        }
        pthread_mutex_lock(&pool.lock);
        while (pool.steps == seen)
            pthread_cond_wait(&pool.begun, &pool.lock);
        seen = pool.steps;
        pthread_mutex_unlock(&pool.lock);
    }
    return NULL;
}

void use_threads(long threads) { /* wakes or starts helpers */
    pthread_mutex_lock(&pool.lock);
    pool.helpers = threads - 1;
    pool.steps++;
    pthread_cond_broadcast(&pool.begun);
    pthread_mutex_unlock(&pool.lock);
    for (pthread_t thread; pool.started < threads - 1; pool.started++)
        if (pthread_create(&thread, NULL, help, (void *)pool.started) == 0)
            pthread_detach(thread);
}

static void run(Task *task, void *argument, long pieces, long share) { /* at least share a claim */
    if (pieces <= share || pool.helpers == 0) {
        for (long piece = 0; piece < pieces; piece++)
            task(argument, piece);
        return;
    }
    pool.task = task, pool.argument = argument, pool.pieces = pieces;
    pool.share = share;
    pool.done = 0;
    pool.unclaimed = pieces;
    long by_helpers = pieces - work();
    for (long looks = 0; pool.done < by_helpers; looks++)
        if (looks > AWAKE)
            sched_yield();
}
