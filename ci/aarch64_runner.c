/* Runs kernels in an emulated AArch64 process: one request a line, `library symbol file threads`, answered by the kernel's
   result, with marks for `aarch64_count.c` around the call. The file holds a count of words, for each a size in bytes (0: the word is a number) and the number or
   where the buffer lies in the file, then the buffers. Each runs with its last byte before a page that nobody may touch. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static int team = 1, me = 0;

/* The pool that kernels call, one thread after the other. */
int omp_get_thread_num(void) { return me; }
int omp_get_num_threads(void) { return team; }
void GOMP_parallel(void (*body)(void *), void *data, unsigned threads, unsigned flags) {
  (void)flags;
  team = (int)threads;
  for (me = 0; me < team; me++) body(data);
  team = 1;
  me = 0;
}

static char *guarded(size_t bytes) {
  size_t page = (size_t)sysconf(_SC_PAGESIZE), room = (bytes + page - 1) / page * page + page;
  char *start = mmap(0, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  mprotect(start + room - page, page, PROT_NONE);
  return start + room - page - bytes;
}

static long long request(const char *library, const char *symbol, const char *path, long threads) {
  int file = open(path, O_RDWR);
  struct stat info;
  if (file < 0 || fstat(file, &info)) return -1;
  char *data = mmap(0, (size_t)info.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  void *code = dlopen(library, RTLD_NOW);
  if (!code) return fprintf(stderr, "%s\n", dlerror()), -2;
  int64_t (*kernel)(int64_t *, int64_t) = (int64_t(*)(int64_t *, int64_t))dlsym(code, symbol);
  if (!kernel) return -3;
  int64_t *head = (int64_t *)data, words = head[0], block[words + 1], result = 0;
  for (int64_t k = 0; k < words; k++) {
    int64_t bytes = head[1 + 2 * k], value = head[2 + 2 * k];
    block[k] = bytes ? (int64_t)memcpy(guarded((size_t)bytes), data + value, (size_t)bytes) : value;
  }
  syscall(1000);
  result = kernel(block, threads);
  syscall(1000);
  for (int64_t k = 0; k < words; k++)
    if (head[1 + 2 * k]) memcpy(data + head[2 + 2 * k], (void *)block[k], (size_t)head[1 + 2 * k]);
  munmap(data, (size_t)info.st_size);
  close(file);
  dlclose(code);
  return result;
}

int main(void) {
  char library[4096], symbol[256], path[4096];
  long threads;
  while (scanf("%4095s %255s %4095s %ld", library, symbol, path, &threads) == 4) {
    printf("%lld\n", request(library, symbol, path, threads));
    fflush(stdout);
  }
  return 0;
}
