/* The forkserver's loop and the walls of one call. Loaded by forkserver.py, inside nsjail but at level `process`.
 *
 * Theory of operation
 *
 *   worker ──control socket──► forkserver ──► init      PID 1 of the call's pid namespace (init.c)
 *                                        └──► program   PID 2: a fork of the warm interpreter behind its walls
 *
 * fork_serve() is entered once by the warm interpreter and returns in each child, where Python goes on with the
 * program; in the forkserver itself it returns only when the worker has gone. The forkserver runs no Python
 * between two calls: it copies no pages, grows nothing, and has no place where an earlier call could stay. It never
 * sees code, input or output, which reach the child as descriptors.
 *
 * Messages on the control socket (SOCK_SEQPACKET, one struct each, same machine, so native byte order):
 *   request RUN   with descriptors stdin, stdout, stderr, payload, note, then the cgroup.procs files to enter
 *   request KILL  end the call and all that it started; a call that is not there any more is no error
 *   reply READY   once, the forkserver serves
 *   reply ENDED   wait status and CPU time; nothing of the call is left when this is sent
 *   reply STARTED twice, only if asked for: the credentials on the message carry the pid of the init, then of the
 *                 program, which the kernel translates for the worker; at level `process` once, with the guardian's
 *                 pid in the place of the wait status
 *   reply FAILED  a step of ours failed, named by `where` and `error`; nothing of the call is left
 *
 * Who may die: the program and its children at any time; they are ours to reap. The init only by our SIGKILL, which
 * takes the whole namespace with it. The worker: we read end of file, return, and exit; we are PID 1 of nsjail's
 * namespace, so the kernel ends everything below us. We ourselves: same thing, and the worker reads end of file.
 *
 * At level `process` there are no namespaces, and a guardian (guardian.c) does what the init does elsewhere. It is the
 * program's parent:
 *
 *   worker ──control socket──► forkserver ──► guardian ──► program
 *
 * It ends by SIGTERM, which it takes as the order to end the call, and we get from it what became of the program. Who may
 * die there: the program; and we, whose end the kernel tells each guardian. A guardian only by the host's hand: then
 * nothing is sure any more, so we end the whole jail. Files are bounded by Landlock (landlock.h), ours and the program's;
 * the call's scratch folder, a real one, comes with the request as its last descriptor, and the worker removes it.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "landlock.h"

/* CPython's own fork protocol: locks before, random state and thread state after. */
extern void PyOS_BeforeFork(void);
extern void PyOS_AfterFork_Parent(void);
extern void PyOS_AfterFork_Child(void);

enum { RUN = 1, KILL = 2 };
enum { READY = 1, ENDED = 2, FAILED = 3, STARTED = 4 };
enum { IN_CHILD = 1, WORKER_GONE = 0 };
/* Of a request. An even number at most: what alignment leaves free behind an odd one, the kernel fills as well. */
enum { STDIN, STDOUT, STDERR, PAYLOAD, NOTE, FIRST_CGROUP, MAX_FDS = 14 };
enum { FOLDER = 5 }; /* in the child, while its walls go up */
enum { MAX_CALLS = 4096 };
enum { CALL_FAILED = 70 };
enum { NAMESPACE_POOL = 8, NAMESPACE_PACE_MS = 5 };
#define KEEP_UID UINT64_MAX
#define SHM_OPTIONS "size=33554432,nr_inodes=64"
#define FOLDER_OPTIONS "mode=1777,uid=%llu,gid=%llu" /* a user that a call's own user namespace knows */

struct request {
	uint64_t kind;
	uint64_t call;
	uint64_t uid; /* inside the jail; KEEP_UID where there is only one */
	uint64_t cpu_s;
	uint64_t file_bytes;
	uint64_t open_files;
	uint64_t processes;
	uint64_t data_bytes; /* RLIMIT_DATA, for hosts without a memory cgroup; 0: none */
	uint64_t scratch_bytes;
	uint64_t scratch_inodes;
	uint64_t tell_pids;
};

struct reply {
	uint64_t kind;
	uint64_t call;
	int64_t wait_status;
	uint64_t cpu_us;
	uint64_t wall_us;
	int64_t error; /* errno of a FAILED step */
	char where[32]; /* name of a FAILED step */
};

/* What a child writes into the fault pipe when a set-up step fails; and a guardian at the end of each call, with no
 * step's name, and the wait status in the place of the error. Smaller than PIPE_BUF, so never torn. */
struct fault {
	uint64_t index;
	int64_t error;
	char where[32];
};

struct call {
	int used;
	uint64_t number;
	pid_t program, init;
	int program_fd, init_fd;
	int killed; /* by us, as the worker told us */
	int is_told; /* by its guardian, how the program ended */
	uint64_t uid;
	int wait_status;
	uint64_t cpu_us, started_us;
	struct fault fault; /* where[0] is 0: none */
};

/* What the loop needs, made once by forkserver.py. */
struct setup {
	int control;
	int init_exe; /* O_PATH descriptor of the tiny init */
	int user_namespaces; /* one for each call as well */
	int loopback; /* a net namespace that no other call uses or has used, with its loopback device up */
	int guardian_exe; /* at level `process`, an O_PATH descriptor of the tiny guardian */
	struct files files;
	struct sock_fprog program_filter; /* second stage; the first is on the forkserver already */
};

static struct call calls[MAX_CALLS];
static int n_calls; /* places of `calls` that were ever used */
static int net_namespaces[MAX_CALLS]; /* for each of those places */
static int epoll, own_pid_ns, fault_read, fault_write;

/* Between `fork_guarded` and the guardian that is being made, which share this memory. */
static volatile struct {
	pid_t forkserver, guardian, program;
	int error;
} guarded;

/* ---- steps: each is checked, and named when it fails ---- */

#ifdef INJECT_FAULTS
/* In builds for tests and for the table of costs, the call with number IN_FORKSERVER + n or IN_PROGRAM + n fails at the
 * n-th step there. */
enum { IN_FORKSERVER = 1000000, IN_PROGRAM = 2000000, MOST_STEPS = 1000 };
static uint64_t steps_to_fault;
static void inject(uint64_t number, uint64_t place)
{
	steps_to_fault = number > place && number < place + MOST_STEPS ? number - place : 0;
}
#define FAILS(expression) (steps_to_fault > 0 && --steps_to_fault == 0 ? (errno = EIO, 1) : (expression) < 0)
#define INJECT(number, place) inject(number, place)
#else
#define FAILS(expression) ((expression) < 0)
#define INJECT(number, place) ((void)0)
#endif

#define STEP(name, expression)                                                                                \
	do {                                                                                                  \
		if (FAILS(expression))                                                                        \
			return (name);                                                                        \
	} while (0)

/* ---- the child ---- */

static int set_limit(unsigned resource, uint64_t soft, uint64_t hard)
{
	struct rlimit limit = {soft, hard};
	return setrlimit(resource, &limit);
}

static int mount_tmpfs(const char *target, const char *options, unsigned long flags)
{
	return mount("none", target, "tmpfs", MS_NOSUID | MS_NODEV | flags, options);
}

/* Empties the bounding set but for some. SETPCAP, which does the dropping, stays effective till `set_capabilities`. */
static int drop_capabilities(uint64_t kept)
{
	int is_there;

	for (int capability = 0; (is_there = prctl(PR_CAPBSET_READ, capability, 0, 0, 0)) >= 0; capability++)
		if (is_there && !(kept >> capability & 1) && prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) < 0)
			return -1;
	return 0; /* the kernel knows no further one */
}

static int set_capabilities(uint32_t kept) /* all that we keep anywhere are among the first 32 */
{
	struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
	struct __user_cap_data_struct sets[2] = {{.effective = kept, .permitted = kept}};
	return (int)syscall(SYS_capset, &header, sets);
}

static int is_guarded(const struct setup *setup)
{
	return setup->files.abi > 0;
}

/* Enters what bounds the call as a whole: its groups first, so that all that follows is charged to it, then its
 * namespaces; at level `process` the folder that the request brought, and no file beyond what landlock.h says. */
static const char *enter_bounds(const struct setup *setup, int init_fd, const int *fds, int n_fds)
{
	for (int i = FIRST_CGROUP; i < n_fds - is_guarded(setup); i++)
		STEP("enter cgroup", write(fds[i], "0", 1));
	if (is_guarded(setup)) {
		STEP("Landlock", restrict_files(&setup->files, fds[n_fds - 1], -1));
		return NULL;
	}
	if (setup->user_namespaces)
		STEP("user namespace", setns(init_fd, CLONE_NEWUSER));
	STEP("namespaces", unshare(CLONE_NEWNS | CLONE_NEWIPC));
	return NULL;
}

/* Where a program's exception, and files of its that are wanted, are put down for the worker (note.py): memory that the
 * two share, since no descriptor stays. The worker has sealed its size, so that it cannot be taken from under us. */
static char *note;
static size_t note_bytes;

static int map_note(int fd)
{
	struct stat about;

	if (fstat(fd, &about) != 0)
		return -1;
	note_bytes = (size_t)about.st_size;
	note = mmap(NULL, note_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	return note == MAP_FAILED ? -1 : 0;
}

/* Descriptors of the message are above these: the forkserver keeps its own in the low numbers. */
static const char *take_descriptors(const struct setup *setup, const int *fds, int n_fds)
{
	STEP("stdin", dup2(fds[STDIN], 0));
	STEP("stdout", dup2(fds[STDOUT], 1));
	STEP("stderr", dup2(fds[STDERR], 2));
	STEP("payload", dup2(fds[PAYLOAD], 3));
	STEP("note", map_note(fds[NOTE]));
	STEP("fault pipe", dup3(fault_write, 4, O_CLOEXEC));
	fault_write = 4;
	if (is_guarded(setup))
		STEP("scratch folder", dup2(fds[n_fds - 1], FOLDER));
	STEP("close_range", (int)syscall(SYS_close_range, FOLDER + is_guarded(setup), ~0U, 0));
	return NULL;
}

static const char *mount_own(const struct request *request)
{
	unsigned long long uid = request->uid == KEEP_UID ? 0 : request->uid;
	char scratch_options[128];

	snprintf(scratch_options, sizeof scratch_options, "size=%llu,nr_inodes=%llu," FOLDER_OPTIONS,
		 (unsigned long long)request->scratch_bytes, (unsigned long long)request->scratch_inodes, uid, uid);
	STEP("mount /tmp", mount_tmpfs("/tmp", scratch_options, 0));
	snprintf(scratch_options, sizeof scratch_options, SHM_OPTIONS "," FOLDER_OPTIONS, uid, uid);
	STEP("mount /dev/shm", mount_tmpfs("/dev/shm", scratch_options, MS_NOEXEC));
	STEP("mount /proc", mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, "subset=pid,hidepid=2"));
	STEP("chdir", chdir("/tmp"));
	return NULL;
}

static const char *set_limits(const struct request *request)
{
	STEP("setsid", setsid());
	/* One more second to the hard limit: SIGXCPU at the soft one ends the program, SIGKILL one that caught it. */
	STEP("RLIMIT_CPU", set_limit(RLIMIT_CPU, request->cpu_s, request->cpu_s + 1));
	STEP("RLIMIT_FSIZE", set_limit(RLIMIT_FSIZE, request->file_bytes, request->file_bytes));
	STEP("RLIMIT_NOFILE", set_limit(RLIMIT_NOFILE, request->open_files, request->open_files));
	/* Here and not once for all, since a user namespace has the limit of who makes it as the bound on all its members. It
	 * bounds timers as well, whose interrupts are nobody's CPU time. */
	STEP("RLIMIT_SIGPENDING", set_limit(RLIMIT_SIGPENDING, 1024, 1024));
	STEP("RLIMIT_NPROC", set_limit(RLIMIT_NPROC, request->processes, request->processes));
	if (request->data_bytes)
		STEP("RLIMIT_DATA", set_limit(RLIMIT_DATA, request->data_bytes, request->data_bytes));
	return NULL;
}

static const char *give_up_privileges(const struct setup *setup, const struct request *request)
{
	/* An ordinary user without namespaces has no capability, not even to drop one, and gains none by any exec. */
	if (!is_guarded(setup) || request->uid != KEEP_UID)
		STEP("bounding set", drop_capabilities(0));
	if (request->uid != KEEP_UID) {
		/* Raw calls: glibc would run its all-threads protocol, and there is one thread. */
		STEP("setgroups", (int)syscall(SYS_setgroups, 0, NULL));
		STEP("setresgid", (int)syscall(SYS_setresgid, request->uid, request->uid, request->uid));
		STEP("setresuid", (int)syscall(SYS_setresuid, request->uid, request->uid, request->uid));
	}
	STEP("capset", set_capabilities(0));
	STEP("parent-death signal", prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)); /* a uid change clears it */
	if (is_guarded(setup)) {
		STEP("enter scratch folder", fchdir(FOLDER)); /* its own user's alone */
		close(FOLDER);
		STEP("guardian", getppid() == guarded.guardian ? 0 : -1); /* it may have died before it could be told */
	}
	STEP("not dumpable", prctl(PR_SET_DUMPABLE, 0, 0, 0, 0));
	STEP("no_new_privs", prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
	STEP("filter", prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &setup->program_filter, 0, 0));
	return NULL;
}

/* Puts up the walls around this process. Returns NULL, or the name of the step that failed, errno set. The order
 * matters: what needs a capability comes before the uid change, and the filter is last. */
static const char *enter_walls(const struct setup *setup, const struct request *request, int init_fd, const int *fds,
			       int n_fds)
{
	const char *failed = enter_bounds(setup, init_fd, fds, n_fds);

	if (!failed)
		failed = take_descriptors(setup, fds, n_fds);
	if (!failed && !is_guarded(setup))
		failed = mount_own(request);
	if (!failed)
		failed = set_limits(request);
	return failed ? failed : give_up_privileges(setup, request);
}

static void run_child(const struct setup *setup, const struct request *request, const int *fds, int n_fds, int index)
{
	INJECT(request->call, IN_PROGRAM);
	const char *failed = enter_walls(setup, request, calls[index].init_fd, fds, n_fds);

	if (failed) {
		struct fault fault = {.index = (uint64_t)index, .error = errno};
		snprintf(fault.where, sizeof fault.where, "%s", failed);
		if (write(fault_write, &fault, sizeof fault) != sizeof fault)
			_exit(CALL_FAILED + 1);
		_exit(CALL_FAILED);
	}
	close(fault_write);
	memset(calls, 0, (size_t)n_calls * sizeof *calls); /* who runs beside us, and how long already */
	PyOS_AfterFork_Child();
}

/* ---- the forkserver ---- */

static uint64_t now_us(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

static uint64_t cpu_us_of(const struct rusage *usage)
{
	return (uint64_t)(usage->ru_utime.tv_sec + usage->ru_stime.tv_sec) * 1000000 +
	       (uint64_t)(usage->ru_utime.tv_usec + usage->ru_stime.tv_usec);
}

/* The worker reads whenever we write and bounds the calls in flight, so a short write means that it has gone;
 * the next read tells. */
static void send_reply(int control, const struct reply *reply)
{
	while (send(control, reply, sizeof *reply, MSG_NOSIGNAL) < 0 && errno == EINTR)
		;
}

static void send_failed(int control, uint64_t number, const char *where, int64_t error)
{
	struct reply reply = {.kind = FAILED, .call = number, .error = error};
	snprintf(reply.where, sizeof reply.where, "%s", where);
	send_reply(control, &reply);
}

/* Names a process to the worker, whose pid namespace we cannot see: the kernel translates credentials. */
static int tell_pid(int control, uint64_t number, pid_t pid)
{
	struct reply reply = {.kind = STARTED, .call = number};
	struct ucred credentials = {.pid = pid, .uid = getuid(), .gid = getgid()};
	union {
		char space[CMSG_SPACE(sizeof credentials)];
		struct cmsghdr align;
	} ancillary;
	struct iovec part = {&reply, sizeof reply};
	struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &ancillary,
				 .msg_controllen = sizeof ancillary};

	memset(&ancillary, 0, sizeof ancillary);
	struct cmsghdr *header = CMSG_FIRSTHDR(&message);
	header->cmsg_level = SOL_SOCKET;
	header->cmsg_type = SCM_CREDENTIALS;
	header->cmsg_len = CMSG_LEN(sizeof credentials);
	memcpy(CMSG_DATA(header), &credentials, sizeof credentials);
	return sendmsg(control, &message, MSG_NOSIGNAL) < 0 ? -1 : 0;
}

static int run_init(void *init_exe)
{
	static char *const argv[] = {"init", NULL}, *const environment[] = {NULL};

	prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
	syscall(SYS_close_range, 0, ~0U, CLOSE_RANGE_CLOEXEC);
	syscall(SYS_execveat, *(int *)init_exe, "", argv, environment, AT_EMPTY_PATH);
	_exit(127);
}

/* Starts PID 1 of a new pid namespace, if asked for in a new user namespace. The child borrows our memory until it has
 * executed the tiny init, which is what makes this cheap; CLONE_VFORK keeps us out of that memory meanwhile. */
static int start_init(struct call *call, const struct setup *setup)
{
	static char stack[16384] __attribute__((aligned(64)));
	int flags = CLONE_VM | CLONE_VFORK | CLONE_NEWPID | CLONE_PIDFD | SIGCHLD;
	int init_exe = setup->init_exe;

	call->init_fd = -1;
	call->init = clone(run_init, stack + sizeof stack, flags | (setup->user_namespaces ? CLONE_NEWUSER : 0),
			   &init_exe, &call->init_fd);
	return call->init < 0 ? -1 : 0;
}

/* Gives the init's user namespace the one user that the call is, under its own number. */
static int map_user(pid_t init, uint64_t uid)
{
	static const char *const names[] = {"uid_map", "gid_map"};
	char path[64], line[64];
	unsigned long long number = uid == KEEP_UID ? 0 : uid;
	int length = snprintf(line, sizeof line, "%llu %llu 1", number, number);

	for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
		snprintf(path, sizeof path, "/proc/%d/%s", init, names[i]);
		int fd = open(path, O_WRONLY | O_CLOEXEC);
		if (fd < 0)
			return -1;
		ssize_t written = write(fd, line, (size_t)length);
		close(fd);
		if (written != length)
			return -1;
	}
	return 0;
}

/* Executes the guardian in this process, which forkserver and program have been waiting for; on failure ends both. */
static void execute_guardian(const struct setup *setup, const struct request *request, int index)
{
	char numbers[4][24];
	char *const argv[] = {"guardian", numbers[0], numbers[1], numbers[2], numbers[3], NULL}, *const environment[] = {NULL};

	snprintf(numbers[0], sizeof *numbers, "%d", index);
	snprintf(numbers[1], sizeof *numbers, "%d", guarded.program);
	snprintf(numbers[2], sizeof *numbers, "%d", guarded.forkserver);
	if (request->uid == KEEP_UID)
		strcpy(numbers[3], "-");
	else
		snprintf(numbers[3], sizeof *numbers, "%llu", (unsigned long long)request->uid);
	if (dup2(fault_write, 0) == 0 && syscall(SYS_close_range, 3, ~0U, CLOSE_RANGE_CLOEXEC) == 0)
		syscall(SYS_execveat, setup->guardian_exe, "", argv, environment, AT_EMPTY_PATH);
	guarded.error = errno;
	kill(guarded.program, SIGKILL);
	waitpid(guarded.program, NULL, __WALL);
	guarded.program = -1;
	_exit(CALL_FAILED);
}

/* Forks the program with a guardian between it and us. Returns as fork does.
 *
 * The guardian borrows our memory until it executes its own file, while we are stopped (vfork). In between it forks the
 * program, which is thus a fork of the warm interpreter as any other: one copy of page tables for two processes. */
static pid_t fork_guarded(const struct setup *setup, const struct request *request, struct call *call, int index)
{
	sigset_t awaited, before;

	sigemptyset(&awaited);
	sigaddset(&awaited, SIGCHLD);
	sigaddset(&awaited, SIGTERM);
	guarded.program = -1;
	guarded.forkserver = getpid();
	pid_t guardian = vfork();
	if (guardian == 0) {
		sigprocmask(SIG_BLOCK, &awaited, &before);
		guarded.guardian = getpid();
		if (prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0 &&
		    (request->uid != KEEP_UID || restrict_signals(&setup->files) == 0))
			guarded.program = fork();
		if (guarded.program == 0) {
			sigprocmask(SIG_SETMASK, &before, NULL);
			return 0;
		}
		if (guarded.program < 0) {
			guarded.error = errno;
			_exit(CALL_FAILED);
		}
		execute_guardian(setup, request, index);
	}
	if (guardian < 0)
		return -1;
	if (guarded.program < 0) {
		waitpid(guardian, NULL, 0);
		errno = guarded.error;
		return -1;
	}
	call->init = guardian;
	return guarded.program;
}

static int watch(int fd, uint64_t tag)
{
	struct epoll_event event = {.events = EPOLLIN, .data.u64 = tag};
	return epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event);
}

/* Closing alone would not end the watch: a child that was just forked holds a copy until its close_range. */
static void unwatch(int *fd)
{
	if (*fd < 0)
		return;
	epoll_ctl(epoll, EPOLL_CTL_DEL, *fd, NULL); /* ENOENT for one that was never watched is fine */
	close(*fd);
	*fd = -1;
}

#define TAG_PROGRAM(index) ((uint64_t)(index) * 2 + 2)
#define TAG_INIT(index) ((uint64_t)(index) * 2 + 3)
#define TAG_CONTROL 0
#define TAG_INDEX(tag) ((int)((tag) - 2) / 2)

static int end_signal = SIGKILL; /* to a guardian SIGTERM */

/* Our child, and not waited for yet, so its pid is its own. */
static void end_init(struct call *call)
{
	kill(call->init, end_signal);
}

static void forget(struct call *call)
{
	unwatch(&call->program_fd);
	unwatch(&call->init_fd);
	memset(call, 0, sizeof *call); /* children inherit this memory, and an ended call is nobody's business */
}

static void read_faults(void)
{
	struct fault fault;

	while (read(fault_read, &fault, sizeof fault) == sizeof fault) {
		if (fault.index >= MAX_CALLS || !calls[fault.index].used)
			continue;
		if (fault.where[0]) {
			calls[fault.index].fault = fault;
		} else {
			calls[fault.index].is_told = 1;
			calls[fault.index].wait_status = (int)fault.error;
		}
	}
}

/* A step of ours failed: take down what stands, and say so. */
static void abandon(int control, struct call *call, const char *where)
{
	uint64_t number = call->number;
	int error = errno;

	if (call->init > 0) {
		end_init(call);
		if (call->program > 0)
			waitpid(call->program, NULL, __WALL);
		waitpid(call->init, NULL, __WALL);
	}
	read_faults(); /* one of this call's, read later, would be that of the next call in its place */
	forget(call);
	send_failed(control, number, where, error);
}

/* Takes us, and with us the next call, into the net namespace of its place in `calls`, an empty one that the calls of
 * that place use one after the other. To share one among calls that run at the same time would show each the sockets of
 * the others (/proc/self/net/unix); one for every call costs 0.5 ms, and more when the kernel takes them down. */
static int enter_net_namespace(int index)
{
	static int current = -1;

	if (index == current)
		return 0;
	if (net_namespaces[index] > 0) {
		if (setns(net_namespaces[index], CLONE_NEWNET) < 0)
			return -1;
	} else {
		current = -1;
		if (unshare(CLONE_NEWNET) < 0)
			return -1;
		net_namespaces[index] = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
		if (net_namespaces[index] < 0)
			return -1;
	}
	current = index;
	return 0;
}

/* With sockets a net namespace serves one call: ports that wait for their end would meet the next. They are made ahead,
 * a few, and never faster than the kernel takes them down, which it does one by one for the whole machine. */
static int namespace_pool[NAMESPACE_POOL], n_namespace_pool;
static uint64_t namespace_made_us;

static int raise_loopback(void)
{
	struct ifreq device = {.ifr_name = "lo"};
	int result, any = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	if (any < 0)
		return -1;
	result = ioctl(any, SIOCGIFFLAGS, &device);
	device.ifr_flags |= IFF_UP;
	if (result == 0)
		result = ioctl(any, SIOCSIFFLAGS, &device);
	close(any);
	return result;
}

/* Connections that nobody accepts are made by the kernel and charged to nobody, so there are to be few of them. */
static int shorten_backlogs(void)
{
	static const char most[] = "128";
	int setting = open("/proc/sys/net/core/somaxconn", O_WRONLY | O_CLOEXEC);

	if (setting < 0)
		return -1;
	ssize_t written = write(setting, most, sizeof most - 1);
	close(setting);
	return written < 0 ? -1 : 0;
}

static int make_net_namespace(void)
{
	namespace_made_us = now_us();
	if (unshare(CLONE_NEWNET) < 0 || raise_loopback() < 0 || shorten_backlogs() < 0)
		return -1;
	int made = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
	if (made >= 0)
		namespace_pool[n_namespace_pool++] = made;
	return made < 0 ? -1 : 0;
}

/* Milliseconds until the pool should get another namespace; -1: it needs none. */
static int refill_in_ms(const struct setup *setup)
{
	if (!setup->loopback || n_namespace_pool == NAMESPACE_POOL)
		return -1;
	uint64_t gone_ms = (now_us() - namespace_made_us) / 1000;
	return gone_ms < NAMESPACE_PACE_MS ? NAMESPACE_PACE_MS - (int)gone_ms : 0;
}

static int enter_new_net_namespace(const struct setup *setup)
{
	if (n_namespace_pool == 0) {
		poll(NULL, 0, refill_in_ms(setup));
		if (make_net_namespace() < 0)
			return -1;
	}
	int mine = namespace_pool[--n_namespace_pool];
	int result = setns(mine, CLONE_NEWNET);
	close(mine);
	return result;
}

static const char *before_fork(const struct setup *setup, const struct request *request, struct call *call, int index)
{
	STEP("net namespace", setup->loopback ? enter_new_net_namespace(setup) : enter_net_namespace(index));
	STEP("start init", start_init(call, setup));
	if (setup->user_namespaces)
		STEP("user mapping", map_user(call->init, request->uid));
	STEP("enter pid namespace", setns(call->init_fd, CLONE_NEWPID)); /* the next fork is born into it */
	return NULL;
}

static const char *after_fork(const struct setup *setup, const struct request *request, struct call *call, int index)
{
	struct reply started = {.kind = STARTED, .call = call->number, .wait_status = call->init};

	STEP("fork", call->program);
	if (is_guarded(setup)) {
		STEP("handle on guardian", call->init_fd = (int)syscall(SYS_pidfd_open, call->init, 0));
		STEP("watch guardian", watch(call->init_fd, TAG_INIT(index)));
		if (request->tell_pids)
			send_reply(setup->control, &started);
		return NULL;
	}
	STEP("handle on program", call->program_fd = (int)syscall(SYS_pidfd_open, call->program, 0));
	STEP("watch program", watch(call->program_fd, TAG_PROGRAM(index)));
	if (request->tell_pids) {
		STEP("tell init", tell_pid(setup->control, call->number, call->init));
		STEP("tell program", tell_pid(setup->control, call->number, call->program));
	}
	return NULL;
}

static void close_all(const int *fds, int n_fds)
{
	int error = errno;

	for (int i = 0; i < n_fds; i++)
		close(fds[i]);
	errno = error;
}

/* Returns IN_CHILD in the program, 0 in the forkserver; a failure is answered on the control socket. The message's
 * descriptors are closed before we answer: nothing of the call is left then. */
static int start_call(const struct setup *setup, const struct request *request, const int *fds, int n_fds)
{
	int index = 0;
	while (index < MAX_CALLS && calls[index].used)
		index++;
	if (index == MAX_CALLS || n_fds < FIRST_CGROUP) {
		close_all(fds, n_fds);
		send_failed(setup->control, request->call, "bad request", EINVAL);
		return 0;
	}
	struct call *call = &calls[index];
	*call = (struct call){.used = 1, .number = request->call, .uid = request->uid, .program_fd = -1, .init_fd = -1,
			      .started_us = now_us()};

	if (index >= n_calls)
		n_calls = index + 1;
	INJECT(request->call, IN_FORKSERVER);
	const char *failed = is_guarded(setup) ? NULL : before_fork(setup, request, call, index);
	if (!failed) {
		PyOS_BeforeFork();
		call->program = is_guarded(setup) ? fork_guarded(setup, request, call, index) : fork();
		if (call->program == 0) {
			run_child(setup, request, fds, n_fds, index);
			return IN_CHILD;
		}
		int error = errno;
		PyOS_AfterFork_Parent();
		if (!is_guarded(setup) && FAILS(setns(own_pid_ns, CLONE_NEWPID)))
			_exit(CALL_FAILED); /* every later child would be born into the wrong namespace */
		errno = error;
		failed = after_fork(setup, request, call, index);
	}
	close_all(fds, n_fds);
	if (failed)
		abandon(setup->control, call, failed);
	return 0;
}

static void kill_call(uint64_t number)
{
	for (int index = 0; index < MAX_CALLS; index++)
		if (calls[index].used && calls[index].number == number) {
			calls[index].killed = 1;
			end_init(&calls[index]);
		}
}

/* Somebody on the host has killed a guardian, and what its program started is now our child or a child's. Ends that, by its
 * uid; where all have one, the calls of the whole jail, which is what we may signal. Then every call, and us. */
static void end_jail(struct call *lost)
{
	lost->used = 0;
	if (lost->uid == KEEP_UID) {
		kill(-1, SIGKILL);
	} else if (syscall(SYS_setresuid, lost->uid + 1, lost->uid, 0) == 0) { /* by ourselves, as in guardian.c */
		kill(-1, SIGKILL);
		syscall(SYS_setresuid, 0, 0, 0);
	}
	for (int index = 0; index < n_calls; index++)
		if (calls[index].used)
			end_init(&calls[index]);
	while (waitpid(-1, NULL, __WALL) > 0)
		;
	_exit(CALL_FAILED);
}

/* An init ends by our signal only. If it ended by somebody else's, of the host, then the program was killed for it and has
 * no verdict. To enter its namespace tells: the kernel refuses that from before it kills what is in there. The end of the
 * init would not tell, for it waits until we have reaped the program. */
static int init_is_dead(const struct call *call)
{
	if (setns(call->init_fd, CLONE_NEWPID) < 0)
		return 1;
	if (setns(own_pid_ns, CLONE_NEWPID) < 0)
		_exit(CALL_FAILED); /* every later child would be born into the wrong namespace */
	return 0;
}

/* The main program has ended, so the call has: whatever else it started is killed. */
static void program_ended(int control, struct call *call, int index)
{
	struct rusage usage;

	if (wait4(call->program, &call->wait_status, __WALL, &usage) < 0) {
		abandon(control, call, "wait for program");
		return;
	}
	call->cpu_us = cpu_us_of(&usage);
	read_faults(); /* written before the exit that we have just seen */
	if (WIFSIGNALED(call->wait_status) && WTERMSIG(call->wait_status) == SIGKILL && !call->killed &&
	    init_is_dead(call)) {
		call->fault.error = ESRCH;
		snprintf(call->fault.where, sizeof call->fault.where, "keep init");
	}
	end_init(call);
	unwatch(&call->program_fd);
	call->program = 0;
	if (watch(call->init_fd, TAG_INIT(index)) < 0)
		abandon(control, call, "watch init");
}

/* The init ends only when nothing of its namespace is left. Its usage holds that of the orphans it reaped. */
static void init_ended(int control, struct call *call)
{
	struct rusage usage;
	int status;

	if (wait4(call->init, &status, __WALL, &usage) < 0) {
		abandon(control, call, "wait for init");
		return;
	}
	if (end_signal == SIGTERM) {
		read_faults(); /* written before the end that we have just seen */
		if (!call->is_told)
			end_jail(call);
	}
	struct call ended = *call;
	forget(call); /* first, so that nothing of the call is left when the worker hears of its end */
	if (ended.fault.where[0]) {
		send_failed(control, ended.number, ended.fault.where, ended.fault.error);
		return;
	}
	struct reply reply = {.kind = ENDED,
			      .call = ended.number,
			      .wait_status = ended.wait_status,
			      .cpu_us = ended.cpu_us + cpu_us_of(&usage),
			      .wall_us = now_us() - ended.started_us};
	send_reply(control, &reply);
}

/* Returns IN_CHILD, WORKER_GONE, or -1 to go on. */
static int read_request(const struct setup *setup)
{
	struct request request;
	union {
		char space[CMSG_SPACE(MAX_FDS * sizeof(int))];
		struct cmsghdr align;
	} control;
	struct iovec part = {&request, sizeof request};
	struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control,
				 .msg_controllen = sizeof control};
	int fds[MAX_FDS], n_fds = 0;

	ssize_t size = recvmsg(setup->control, &message, MSG_CMSG_CLOEXEC);
	if (size < 0)
		return errno == EINTR ? -1 : WORKER_GONE;
	if (size == 0)
		return WORKER_GONE;
	struct cmsghdr *header = CMSG_FIRSTHDR(&message);
	while (header && !(header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS))
		header = CMSG_NXTHDR(&message, header);
	if (header) {
		n_fds = (int)((header->cmsg_len - CMSG_LEN(0)) / sizeof(int));
		memcpy(fds, CMSG_DATA(header), (size_t)n_fds * sizeof(int));
	}
	if (size != sizeof request || message.msg_flags & (MSG_TRUNC | MSG_CTRUNC))
		_exit(CALL_FAILED); /* the worker and we do not speak the same protocol */
	if (request.kind == RUN)
		return start_call(setup, &request, fds, n_fds) == IN_CHILD ? IN_CHILD : -1;
	if (request.kind == KILL)
		kill_call(request.call);
	close_all(fds, n_fds);
	return -1;
}

/* Clears what the functions that handled an event left below us on the stack, which children inherit as well. */
__attribute__((noinline)) static void scrub_stack(void)
{
	char below[4096];
	explicit_bzero(below, sizeof below);
}

/* Installs the first filter stage on the forkserver, which every child inherits for nothing. Returns 0 or -errno. */
int fork_filter(const struct sock_fprog *filter)
{
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filter, 0, 0) < 0)
		return -errno;
	return 0;
}

/* Level `process`: bounds the forkserver itself, before it imports anything: its files, and as root its capabilities, to
 * what it needs for a program's user (SETUID, SETGID), for its bounding set (SETPCAP) and for its end (KILL). Nothing may
 * stay in the bounding set beyond these: an exec that gains one costs a process its parent-death signal. */
int fork_confine(const struct setup *setup)
{
	uint32_t kept = 1U << CAP_SETUID | 1U << CAP_SETGID | 1U << CAP_SETPCAP | 1U << CAP_KILL;

	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 ||
	    (geteuid() == 0 && (drop_capabilities(kept) < 0 || set_capabilities(kept) < 0)) ||
	    restrict_files(&setup->files, setup->files.scratch, setup->files.proc) < 0)
		return -errno;
	return 0;
}

/* Puts down a record in the child; what has no room is not. */
void fork_note(size_t at, const void *record, size_t size)
{
	if (at <= note_bytes && size <= note_bytes - at)
		memcpy(note + at, record, size);
}

/* Makes huge pages of the warm heap, once. A fork then copies one entry for 2 MiB instead of 512, and a write in the
 * child still copies just 4 KiB: with sympy loaded a call costs a third less. Before Linux 6.1, or where the kernel finds
 * no room, the pages stay as they are. */
int collapse_heap(void)
{
	enum { HUGE = 2 << 20, COLLAPSE = 25 };
	FILE *maps = fopen("/proc/self/maps", "re");
	char line[512], access[5];
	uint64_t start, end, inode;

	if (!maps)
		return -1;
	while (fgets(line, sizeof line, maps)) {
		if (sscanf(line, "%" SCNx64 "-%" SCNx64 " %4s %*s %*s %" SCNu64, &start, &end, access, &inode) != 4)
			continue;
		if (inode != 0 || access[1] != 'w' || strstr(line, "[stack]"))
			continue;
		start = (start + HUGE - 1) / HUGE * HUGE;
		end = end / HUGE * HUGE;
		if (start < end)
			madvise((void *)start, end - start, COLLAPSE);
	}
	fclose(maps);
	return 0;
}

/* Serves until the worker has gone. Returns IN_CHILD in each program, WORKER_GONE in the forkserver, or -errno
 * when the loop cannot be set up. */
int fork_serve(const struct setup *setup)
{
	int pipe_fds[2];
	struct epoll_event events[64];
	struct reply ready = {.kind = READY};

	own_pid_ns = open("/proc/self/ns/pid", O_RDONLY | O_CLOEXEC);
	epoll = epoll_create1(EPOLL_CLOEXEC);
	if (own_pid_ns < 0 || epoll < 0 || pipe2(pipe_fds, O_CLOEXEC) < 0 ||
	    collapse_heap() < 0 || fcntl(pipe_fds[0], F_SETFL, O_NONBLOCK) < 0 || watch(setup->control, TAG_CONTROL) < 0)
		return -errno;
	if (is_guarded(setup)) {
		end_signal = SIGTERM;
		prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); /* for `end_jail` */
	}
	fault_read = pipe_fds[0];
	fault_write = pipe_fds[1]; /* blocks when full: a child that cannot tell its fault must not exit */
	send_reply(setup->control, &ready);

	for (;;) {
		int n = epoll_wait(epoll, events, 64, refill_in_ms(setup));
		if (n < 0 && errno != EINTR)
			return -errno;
		if (n == 0)
			make_net_namespace(); /* the call that finds none tries again, and tells */
		for (int i = 0; i < n; i++) {
			uint64_t tag = events[i].data.u64;
			if (tag == TAG_CONTROL) {
				int outcome = read_request(setup);
				if (outcome >= 0)
					return outcome;
				continue;
			}
			struct call *call = &calls[TAG_INDEX(tag)];
			if (tag == TAG_PROGRAM(TAG_INDEX(tag)))
				program_ended(setup->control, call, TAG_INDEX(tag));
			else
				init_ended(setup->control, call);
			scrub_stack();
		}
	}
}
