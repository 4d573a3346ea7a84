/* Takes pyxis's place on a test cluster: its options exist, its mounts are made and its working directory is entered, in a
 * mount namespace of the task's own. The image is not unpacked: the task sees the machine's root, and an image that is a path must
 * be there. So a script written for pyxis runs, and a path that is not mounted under the name that the script uses is missing.
 * As enroot's hook for images of PyTorch does, it calls each task a rank of torch.distributed.
 *
 *     gcc -shared -fPIC -o pyxis.so pyxis_stand_in.c        plugstack.conf: required /path/pyxis.so
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <slurm/spank.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

SPANK_PLUGIN(pyxis_stand_in, 1)

enum { IMAGE, MOUNTS, WORKDIR, OTHER };
static char *given[OTHER + 1];

static int take(int which, const char *value, int remote) {
    (void)remote;
    given[which] = value ? strdup(value) : NULL;
    return 0;
}

static struct spank_option options[] = {
    {"container-image", "IMAGE", "container image", 1, IMAGE, take},
    {"container-mounts", "FROM:TO[:FLAGS],...", "bind mounts", 1, MOUNTS, take},
    {"container-workdir", "PATH", "working directory", 1, WORKDIR, take},
    {"container-env", "NAME,...", "variables of the host that win over the image's", 1, OTHER, take},
    {"container-name", "NAME", "name", 1, OTHER, take},
    {"no-container-mount-home", NULL, "do not mount the home directory", 0, OTHER, take},
    SPANK_OPTIONS_TABLE_END,
};

static int failed(const char *what, const char *path) {
    slurm_error("pyxis stand-in: %s %s: %m", what, path);
    return -1;
}

static int mount_one(char *from) {
    char *to = strchr(from, ':'), *flags;
    struct stat found;
    if (to) {
        *to++ = 0;
        if ((flags = strchr(to, ':'))) *flags = 0;
    } else {
        to = from;
    }
    if (stat(from, &found)) return failed("no such mount source", from);
    if (S_ISDIR(found.st_mode)) {
        mkdir(to, 0755);
    } else {
        int file = open(to, O_CREAT | O_WRONLY, 0644);
        if (file >= 0) close(file);
    }
    return mount(from, to, NULL, MS_BIND | MS_REC, NULL) ? failed("cannot mount", to) : 0;
}

int slurm_spank_init(spank_t spank, int count, char **arguments) {
    (void)count, (void)arguments;
    for (int i = 0; options[i].name; i++)
        if (spank_option_register(spank, &options[i]) != ESPANK_SUCCESS) return -1;
    return 0;
}

int slurm_spank_task_init_privileged(spank_t spank, int count, char **arguments) {
    struct stat found;
    char *rest = NULL, *mounts = given[MOUNTS] ? strdup(given[MOUNTS]) : NULL;
    (void)spank, (void)count, (void)arguments;
    if (!given[IMAGE]) return 0;
    if (given[IMAGE][0] == '/' && stat(given[IMAGE], &found)) return failed("no such image", given[IMAGE]);
    if (unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL)) return failed("unshare", "/");
    for (char *each = mounts ? strtok_r(mounts, ",", &rest) : NULL; each; each = strtok_r(NULL, ",", &rest))
        if (mount_one(each)) return -1;
    return 0;
}

static void call(spank_t spank, const char *name, const char *of) {
    char value[64];
    if (spank_getenv(spank, of, value, sizeof(value)) == ESPANK_SUCCESS) spank_setenv(spank, name, value, 0);
}

int slurm_spank_task_init(spank_t spank, int count, char **arguments) {
    (void)count, (void)arguments;
    if (!given[IMAGE]) return 0;
    call(spank, "RANK", "SLURM_PROCID");
    call(spank, "LOCAL_RANK", "SLURM_LOCALID");
    call(spank, "WORLD_SIZE", "SLURM_NTASKS");
    if (!given[WORKDIR]) return 0;
    if (chdir(given[WORKDIR])) return failed("no such working directory", given[WORKDIR]);
    spank_setenv(spank, "PWD", given[WORKDIR], 1);
    return 0;
}
