/* The files of a program at level `process`, where no mount namespace hides the host's: a Landlock domain.
 *
 * Two domains, one inside the other, since what the inner one allows the outer one must allow too:
 *   forkserver  reads and executes `readable`, reads and writes `devices` and everything below `scratch`, reads /proc
 *   program     the same, but of `scratch` only its own folder, and no /proc
 * Everything else can neither be opened, made, renamed nor removed. Where the kernel can (Linux 6.12), neither signals nor
 * abstract unix sockets reach out of a domain; and no TCP (6.7), behind the filter, which allows no socket at all.
 *
 * What Landlock does not see: stat, chdir, chmod, chown, times and extended attributes. As root the program is a user
 * who owns nothing outside; for an ordinary user's programs the policy of system calls refuses what changes a file.
 */

#include <stddef.h>
#include <stdint.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { MAX_READABLE = 16, MAX_DEVICES = 8 };
enum { ABI_REFER = 2, ABI_TRUNCATE = 3, ABI_TCP = 4, ABI_IOCTL = 5, ABI_SCOPE = 6 };

/* Numbers of the kernel's interface, which the headers of a build host may not have yet. */
enum { CREATE_RULESET = 444, ADD_RULE = 445, RESTRICT_SELF = 446, PATH_BENEATH = 1 };
enum {
	EXECUTE = 1 << 0,
	WRITE_FILE = 1 << 1,
	READ_FILE = 1 << 2,
	READ_FOLDER = 1 << 3,
	ALL_OF_ABI_1 = (1 << 13) - 1,
	REFER = 1 << 13,
	TRUNCATE = 1 << 14,
	IOCTL_DEVICE = 1 << 15,
	OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEVICE,
};

/* O_PATH descriptors of what stays open, made by forkserver.py. */
struct files {
	int abi; /* of Landlock; 0: not level `process` */
	int scratch, proc;
	int readable[MAX_READABLE], devices[MAX_DEVICES]; /* up to the first -1 */
};

struct ruleset {
	uint64_t files, tcp, scope;
};

struct rule {
	uint64_t access;
	int32_t fd;
} __attribute__((packed));

static uint64_t known_rights(int abi)
{
	return ALL_OF_ABI_1 | (abi >= ABI_REFER ? REFER : 0) | (abi >= ABI_TRUNCATE ? TRUNCATE : 0) |
	       (abi >= ABI_IOCTL ? IOCTL_DEVICE : 0);
}

static int allow(int ruleset, int fd, uint64_t access, int abi)
{
	struct stat about;
	struct rule rule = {access & known_rights(abi), fd};

	if (fstat(fd, &about) < 0)
		return -1;
	if (!S_ISDIR(about.st_mode))
		rule.access &= OF_FILES;
	return (int)syscall(ADD_RULE, ruleset, PATH_BENEATH, &rule, 0);
}

/* A domain that only bounds signals: who made it can signal those in it, and they can signal no one else. To move a
 * file to another folder takes the leave of every domain, so it gives that one. */
static int restrict_signals(const struct files *files)
{
	struct ruleset handled = {.files = REFER, .scope = 1 << 1};
	int ruleset = (int)syscall(CREATE_RULESET, &handled, sizeof handled, 0), result = -1;

	if (ruleset < 0)
		return -1;
	if (allow(ruleset, files->scratch, REFER, files->abi) == 0)
		result = (int)syscall(RESTRICT_SELF, ruleset, 0);
	close(ruleset);
	return result;
}

static int allow_all(int ruleset, const struct files *files, int scratch, int proc)
{
	for (const int *fd = files->readable; *fd >= 0; fd++)
		if (allow(ruleset, *fd, EXECUTE | READ_FILE | READ_FOLDER, files->abi) < 0)
			return -1;
	for (const int *fd = files->devices; *fd >= 0; fd++)
		if (allow(ruleset, *fd, READ_FILE | WRITE_FILE | TRUNCATE, files->abi) < 0)
			return -1;
	if (proc >= 0 && allow(ruleset, proc, READ_FILE | READ_FOLDER, files->abi) < 0)
		return -1;
	return allow(ruleset, scratch, ~(uint64_t)IOCTL_DEVICE, files->abi);
}

/* Enters a domain with these files, for good. proc may be -1. Needs no_new_privs. */
static int restrict_files(const struct files *files, int scratch, int proc)
{
	struct ruleset handled = {.files = known_rights(files->abi),
				  .tcp = files->abi >= ABI_TCP ? 3 : 0,
				  .scope = files->abi >= ABI_SCOPE ? 3 : 0};
	int ruleset = (int)syscall(CREATE_RULESET, &handled, sizeof handled, 0), result = -1;

	if (ruleset < 0)
		return -1;
	if (allow_all(ruleset, files, scratch, proc) == 0)
		result = (int)syscall(RESTRICT_SELF, ruleset, 0);
	close(ruleset);
	return result;
}
