/* A plugin for QEMU (interface version 1) that counts the guest's instructions and writes the sum at exit, to the file that
   `out=` names. Debian ships no header for plugins: what is used of it is declared here. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef uint64_t plugin_id;
struct tb;
extern void qemu_plugin_register_vcpu_tb_trans_cb(plugin_id, void (*)(plugin_id, struct tb *));
extern size_t qemu_plugin_tb_n_insns(const struct tb *);
extern void qemu_plugin_register_vcpu_tb_exec_inline(struct tb *, int op, void *counter, uint64_t add);
extern void qemu_plugin_register_atexit_cb(plugin_id, void (*)(plugin_id, void *), void *);

int qemu_plugin_version = 1;
static uint64_t count;
static char path[4096] = "instructions";

static void translated(plugin_id id, struct tb *tb) {
  (void)id;
  qemu_plugin_register_vcpu_tb_exec_inline(tb, 0, &count, qemu_plugin_tb_n_insns(tb));
}

static void finished(plugin_id id, void *data) {
  (void)id, (void)data;
  FILE *out = fopen(path, "w");
  if (out) fprintf(out, "%llu\n", (unsigned long long)count), fclose(out);
}

int qemu_plugin_install(plugin_id id, const void *info, int argc, char **argv) {
  (void)info;
  for (int i = 0; i < argc; i++)
    if (!strncmp(argv[i], "out=", 4)) snprintf(path, sizeof path, "%s", argv[i] + 4);
  qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
  qemu_plugin_register_atexit_cb(id, finished, 0);
  return 0;
}
