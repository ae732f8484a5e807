/* Drives the forkserver's loop without nsjail and without Python: harness INIT, as root.
 *
 * Theory of operation. We are the worker. `start` makes a forkserver: PID 1 of fresh namespaces, where it runs fork_serve()
 * of fork.c, which is part of this program, compiled with INJECT_FAULTS. We send requests and check every reply and, at the
 * end, what the forkserver still holds. Programs are the letters in `run_program`. Whatever a sanitizer or valgrind has to
 * say changes the exit status of the process it says it of, and we check all of those.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

/* What we tell a forkserver on the side, to fail where no request can make it. */
static struct {
	_Atomic int fail_wait; /* the n-th wait4 */
	_Atomic int fail_watch; /* the n-th addition to its epoll */
	_Atomic int await_fault; /* after a fork wait until the child has told a fault of its own */
	_Atomic int places; /* for so many calls; 0: all */
} *shared;

static int is_due(_Atomic int *counter)
{
	return *counter > 0 && --*counter == 0;
}

static pid_t failing_wait4(pid_t pid, int *status, int options, struct rusage *usage)
{
	if (is_due(&shared->fail_wait)) {
		errno = ECHILD;
		return -1;
	}
	return wait4(pid, status, options, usage);
}

static int failing_epoll_ctl(int epoll_fd, int operation, int fd, struct epoll_event *event)
{
	if (operation == EPOLL_CTL_ADD && is_due(&shared->fail_watch)) {
		errno = ENOSPC;
		return -1;
	}
	return epoll_ctl(epoll_fd, operation, fd, event);
}

#ifdef FOR_VALGRIND
/* Older versions of valgrind do not know pidfd_open: a handle on a program comes with its fork instead. */
static int forked_fd = -1;

static void drop_handle(void)
{
	if (forked_fd >= 0)
		close(forked_fd);
	forked_fd = -1;
}

static pid_t fork_with_handle(void)
{
	drop_handle(); /* where a fault kept it from being asked for */
	return (pid_t)syscall(SYS_clone, CLONE_PIDFD | SIGCHLD, NULL, &forked_fd, NULL, 0);
}

static int take_handle(void)
{
	int handle = forked_fd;
	forked_fd = -1;
	return handle;
}

static long known_syscall(long number, ...)
{
	long given[5];
	va_list all;

	va_start(all, number);
	for (int i = 0; i < 5; i++)
		given[i] = va_arg(all, long); /* those that are not there are not looked at */
	va_end(all);
	if (number == SYS_pidfd_open)
		return take_handle();
	return syscall(number, given[0], given[1], given[2], given[3], given[4]);
}

#define fork fork_with_handle
#define syscall known_syscall
#endif

#ifndef FOR_VALGRIND
#define drop_handle() ((void)0)
#endif

#ifdef COVERAGE
extern void __gcov_dump(void);
static _Noreturn void leave(int status)
{
	__gcov_dump();
	_exit(status);
}
#define _exit leave
#endif
#define wait4 failing_wait4
#define epoll_ctl failing_epoll_ctl
#include "../../sandbox/jail/fork.c"
#undef wait4
#undef epoll_ctl
#undef fork
#undef syscall

enum { CONTROL = 3, BROKEN = 71, PATIENCE_MS = 60000, FIRST_UID = 200000, MANY = 48 };

#define CHECK(condition)                                                                                              \
	do {                                                                                                          \
		if (!(condition)) {                                                                                   \
			fprintf(stderr, "%s:%d: not so: %s (%s)\n", __FILE__, __LINE__, #condition, strerror(errno)); \
			exit(1);                                                                                      \
		}                                                                                                     \
	} while (0)

void PyOS_BeforeFork(void) {}
void PyOS_AfterFork_Child(void) {}
void PyOS_AfterFork_Parent(void)
{
	struct pollfd fault = {.fd = fault_read, .events = POLLIN};
	if (is_due(&shared->await_fault))
		poll(&fault, 1, PATIENCE_MS);
}

/* ---- the forkserver and its programs ---- */

static void reap_orphan(void)
{
	int pair[2];
	pid_t orphan = 0;

	CHECK(pipe(pair) == 0);
	if (fork() == 0) {
		orphan = fork();
		if (orphan == 0)
			_exit(0);
		CHECK(write(pair[1], &orphan, sizeof orphan) == sizeof orphan);
		_exit(0);
	}
	CHECK(wait(NULL) > 0);
	CHECK(read(pair[0], &orphan, sizeof orphan) == sizeof orphan);
	while (kill(orphan, 0) == 0)
		sched_yield();
}

static void run_program(void)
{
	char what;

	CHECK(read(3, &what, 1) == 1);
	CHECK(getpid() == 2);
	CHECK(fcntl(4, F_GETFD) < 0); /* nothing above the payload */
	CHECK(write(2, "err:", 4) == 4);
	CHECK(write(1, &what, 1) == 1);
	switch (what) {
	case 'e': /* exits */
		_exit(42);
	case 'c': /* crashes */
		signal(SIGABRT, SIG_DFL);
		raise(SIGABRT);
		break;
	case 'k': /* ends as if we had killed it */
		raise(SIGKILL);
		break;
	case 'o': /* leaves processes behind, in sessions of their own */
		for (int i = 0; i < 3; i++)
			if (fork() == 0) {
				setsid();
				for (;;)
					pause();
			}
		_exit(0);
	case 'r': /* orphans a process that ends at once, and waits until init has reaped it */
		reap_orphan();
		_exit(42);
	default: /* hangs, until killed */
		for (;;)
			pause();
	}
}

static int open_descriptors(void)
{
	int open = 0;

	for (int fd = 0; fd < 1000; fd++)
		open += fcntl(fd, F_GETFD) >= 0;
	return open;
}

/* What a forkserver holds when no call is there: one descriptor for each net namespace, and what it had before. */
static int is_idle(int before)
{
	int kept = n_namespace_pool;

	for (int i = 0; i < (shared->places ? shared->places : MAX_CALLS); i++) {
		if (calls[i].used)
			return 0;
		kept += net_namespaces[i] > 0;
	}
	return open_descriptors() == before + 4 + kept; /* epoll, pid namespace, fault pipe */
}

static int serve(const char *init, int control, int user_namespaces, int loopback, int is_quiet)
{
	struct sock_filter allow = BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
	struct setup setup = {.control = CONTROL, .user_namespaces = user_namespaces, .loopback = loopback,
			      .program_filter = {1, &allow}};

	CHECK(mount("none", "/", "", MS_REC | MS_PRIVATE, NULL) == 0);
	CHECK(mount("proc", "/proc", "proc", 0, NULL) == 0);
	CHECK(dup2(control, CONTROL) == CONTROL);
	CHECK(dup2(open("/dev/null", O_RDONLY | O_CLOEXEC), 0) == 0);
	CHECK(close_range(CONTROL + 1, ~0U, 0) == 0);
	setup.init_exe = open(init, O_PATH | O_CLOEXEC);
	CHECK(setup.init_exe == CONTROL + 1);
	CHECK(fork_filter(&setup.program_filter) == 0);
	for (int i = shared->places; shared->places && i < MAX_CALLS; i++)
		calls[i] = (struct call){.used = 1, .number = UINT64_MAX};

	int before = open_descriptors();
	int outcome = fork_serve(&setup);
	if (outcome == IN_CHILD) {
		run_program();
		_exit(BROKEN);
	}
	CHECK(outcome == WORKER_GONE);
	drop_handle();
	CHECK(!is_quiet || is_idle(before));
	return 0;
}

/* ---- the worker ---- */

static const char *init_path;
static int worker = -1; /* our end of the control socket */
static pid_t forkserver;
static int has_user_namespaces, has_loopback;
static uint64_t most_files; /* as now: valgrind keeps the numbers above to itself, and refuses another hard limit */

static struct reply receive(pid_t *sender)
{
	struct reply reply;
	union {
		char space[CMSG_SPACE(sizeof(struct ucred))];
		struct cmsghdr align;
	} control;
	struct iovec part = {&reply, sizeof reply};
	struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control,
				 .msg_controllen = sizeof control};
	struct pollfd ready = {.fd = worker, .events = POLLIN};
	struct ucred credentials;

	memset(&reply, 0, sizeof reply);
	CHECK(poll(&ready, 1, PATIENCE_MS) == 1);
	ssize_t size = recvmsg(worker, &message, MSG_CMSG_CLOEXEC);
	if (size == 0 || (size < 0 && errno == ECONNRESET))
		return reply;
	CHECK(size == sizeof reply);
	CHECK(memchr(reply.where, 0, sizeof reply.where) != NULL);
	struct cmsghdr *header = CMSG_FIRSTHDR(&message);
	CHECK(header && header->cmsg_type == SCM_CREDENTIALS);
	memcpy(&credentials, CMSG_DATA(header), sizeof credentials);
	if (sender)
		*sender = credentials.pid;
	return reply;
}

static void start(int is_quiet)
{
	int pair[2], on = 1;

	CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0);
	worker = pair[0];
	CHECK(setsockopt(worker, SOL_SOCKET, SO_PASSCRED, &on, sizeof on) == 0);
	forkserver = fork();
	CHECK(forkserver >= 0);
	if (forkserver == 0) {
		int status;
		close(worker);
		CHECK(unshare(CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWNET | CLONE_NEWUTS) == 0);
		pid_t inside = fork();
		CHECK(inside >= 0);
		if (inside == 0)
			exit(serve(init_path, pair[1], has_user_namespaces, has_loopback, is_quiet));
		close(pair[1]);
		CHECK(waitpid(inside, &status, 0) == inside);
		exit(WIFEXITED(status) ? WEXITSTATUS(status) : BROKEN);
	}
	close(pair[1]);
	CHECK(receive(NULL).kind == READY);
}

/* Waits for the forkserver's end. It hangs up first, or we do. */
static void expect_end(int exit_status)
{
	int status;

	CHECK(waitpid(forkserver, &status, 0) == forkserver);
	CHECK(WIFEXITED(status));
	CHECK(WEXITSTATUS(status) == exit_status);
	close(worker);
}

static void finish(void)
{
	shutdown(worker, SHUT_WR);
	CHECK(receive(NULL).kind == 0); /* nothing was left to say */
	expect_end(0);
}

static ssize_t send_raw(const void *content, size_t size, const int *fds, size_t n_fds)
{
	union {
		char space[CMSG_SPACE(16 * sizeof(int))];
		struct cmsghdr align;
	} control;
	struct iovec part = {(void *)(uintptr_t)content, size};
	struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};

	if (n_fds > 0) {
		memset(&control, 0, sizeof control);
		message.msg_control = &control;
		message.msg_controllen = CMSG_SPACE(n_fds * sizeof(int));
		struct cmsghdr *header = CMSG_FIRSTHDR(&message);
		header->cmsg_level = SOL_SOCKET;
		header->cmsg_type = SCM_RIGHTS;
		header->cmsg_len = CMSG_LEN(n_fds * sizeof(int));
		memcpy(CMSG_DATA(header), fds, n_fds * sizeof(int));
	}
	return sendmsg(worker, &message, MSG_NOSIGNAL);
}

static struct request request_for(uint64_t kind, uint64_t number)
{
	return (struct request){.kind = kind, .call = number, .uid = KEEP_UID, .cpu_s = 60, .file_bytes = 1 << 26,
				.open_files = most_files, .processes = 4096, .scratch_bytes = 1 << 20, .scratch_inodes = 100};
}

/* Sends a request to run one of our programs; returns the pipe with its output. */
static int send_run(const struct request *request, char program, size_t n_fds, const int *groups)
{
	int fds[MAX_FDS + 8], payload[2], out[2], note_fd = memfd_create("note", MFD_CLOEXEC);

	CHECK(note_fd >= 0 && ftruncate(note_fd, 8192) == 0);

	CHECK(pipe2(payload, O_CLOEXEC) == 0);
	CHECK(write(payload[1], &program, 1) == 1);
	close(payload[1]);
	CHECK(pipe2(out, O_CLOEXEC) == 0);
	fds[STDIN] = payload[0];
	fds[STDOUT] = fds[STDERR] = out[1];
	fds[PAYLOAD] = payload[0];
	fds[NOTE] = note_fd;
	for (size_t i = FIRST_CGROUP; i < n_fds; i++)
		fds[i] = groups[i - FIRST_CGROUP];
	CHECK(send_raw(request, sizeof *request, fds, n_fds) == sizeof *request);
	close(payload[0]);
	close(note_fd);
	close(out[1]);
	return out[0];
}

static void send_kill(uint64_t number)
{
	struct request request = request_for(KILL, number);
	CHECK(send_raw(&request, sizeof request, NULL, 0) == sizeof request);
}

/* All that a program wrote, to the end of file: then no process of the call holds the pipe any more. */
static void expect_output(int out, const char *text)
{
	char all[4096];
	size_t length = 0;
	ssize_t more;

	while (length < sizeof all - 1 && (more = read(out, all + length, sizeof all - 1 - length)) > 0)
		length += (size_t)more;
	all[length] = 0;
	close(out);
	if (strcmp(all, text) != 0)
		fprintf(stderr, "instead of '%s': '%s'\n", text, all);
	CHECK(strcmp(all, text) == 0);
}

static void expect_closed(int out)
{
	char chunk[64];
	while (read(out, chunk, sizeof chunk) > 0)
		;
	close(out);
}

/* Waits until a program that hangs has begun. */
static void await_program(int out)
{
	char text[5];

	for (size_t length = 0; length < sizeof text;) {
		ssize_t more = read(out, text + length, sizeof text - length);
		CHECK(more > 0);
		length += (size_t)more;
	}
	CHECK(memcmp(text, "err:h", sizeof text) == 0);
}

static void expect_failed(uint64_t number, const char *where, int64_t error)
{
	struct reply reply = receive(NULL);

	if (reply.kind == FAILED && strcmp(reply.where, where) != 0)
		fprintf(stderr, "failed at '%s': %s\n", reply.where, strerror((int)reply.error));
	CHECK(reply.kind == FAILED);
	CHECK(reply.call == number);
	CHECK(strcmp(reply.where, where) == 0);
	CHECK(reply.error == error);
}

static int is_end(const struct reply *reply, char program)
{
	int status = (int)reply->wait_status;

	switch (program) {
	case 'e':
	case 'r':
		return WIFEXITED(status) && WEXITSTATUS(status) == 42;
	case 'c':
		return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
	case 'o':
		return WIFEXITED(status) && WEXITSTATUS(status) == 0;
	default:
		return WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
	}
}

static void expect_ended(uint64_t number, char program)
{
	struct reply reply = receive(NULL);

	if (reply.kind == FAILED)
		fprintf(stderr, "failed at '%s': %s\n", reply.where, strerror((int)reply.error));
	CHECK(reply.kind == ENDED);
	CHECK(reply.call == number);
	CHECK(is_end(&reply, program));
	CHECK(reply.where[0] == 0 && reply.error == 0);
}

static void run_well(uint64_t number, char program)
{
	struct request request = request_for(RUN, number);
	char text[] = {'e', 'r', 'r', ':', program, 0};
	int out = send_run(&request, program, FIRST_CGROUP, NULL);

	if (program == 'h') {
		await_program(out);
		send_kill(number);
	}
	expect_ended(number, program);
	expect_output(out, program == 'h' ? "" : text);
}

/* ---- what is tried ---- */

static void try_programs(void)
{
	start(1);
	for (uint64_t round = 0; round < 2; round++)
		for (const char *program = "ecorkh"; *program; program++)
			run_well(round, *program);
	send_kill(12345); /* nobody's number */
	struct request nonsense = request_for(99, 1);
	CHECK(send_raw(&nonsense, sizeof nonsense, (int[]){2, 2}, 2) == sizeof nonsense);
	run_well(7, 'e');
	finish();
}

static void try_bad_requests(void)
{
	int closed_group = open("/dev/null", O_RDONLY | O_CLOEXEC), group = open("/dev/null", O_WRONLY | O_CLOEXEC);

	start(1);
	for (size_t n_fds = 0; n_fds < FIRST_CGROUP; n_fds++) {
		struct request request = request_for(RUN, 10 + n_fds);
		close(send_run(&request, 'e', n_fds, NULL));
		expect_failed(10 + n_fds, "bad request", EINVAL);
	}
	struct request request = request_for(RUN, 20);
	expect_output(send_run(&request, 'e', FIRST_CGROUP + 4, (int[]){group, group, group, closed_group}), "");
	expect_failed(20, "enter cgroup", EBADF);
	expect_output(send_run(&request, 'e', FIRST_CGROUP + 4, (int[]){group, group, group, group}), "err:e");
	expect_ended(20, 'e');
	request.uid = (uint64_t)1 << 40;
	expect_output(send_run(&request, 'e', FIRST_CGROUP, NULL), "");
	expect_failed(20, "mount /tmp", EINVAL);
	request = request_for(RUN, 21);
	request.open_files = (uint64_t)1 << 40;
	expect_output(send_run(&request, 'e', FIRST_CGROUP, NULL), "");
	expect_failed(21, "RLIMIT_NOFILE", EPERM);
	run_well(22, 'e');
	finish();
	close(group);
	close(closed_group);
}

static void try_other_protocols(void)
{
	struct request request[2] = {request_for(RUN, 1), request_for(RUN, 1)};
	const size_t sizes[] = {1, sizeof *request - 1, sizeof *request + 1, sizeof request};
	const int many[16] = {0};

	for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
		start(0);
		CHECK(send_raw(request, sizes[i], many, i % 2 ? 0 : 4) == (ssize_t)sizes[i]);
		expect_end(CALL_FAILED);
	}
	start(0);
	CHECK(send_raw(request, sizeof *request, many, MAX_FDS + 1) == sizeof *request);
	expect_end(CALL_FAILED);
	start(0);
	CHECK(send_raw(request, 0, many, 4) == 0); /* as the end of file reads */
	expect_end(0);
}

/* One step after the other, till a call of that number is well. Returns how many there are. */
static uint64_t try_steps(uint64_t place)
{
	uint64_t ends = 0, step = 0;

	start(1);
	for (;;) {
		struct request request = request_for(RUN, place + ++step);
		request.tell_pids = 1;
		request.data_bytes = (uint64_t)1 << 50;
		request.uid = FIRST_UID;
		int out = send_run(&request, 'e', FIRST_CGROUP, NULL);
		struct reply reply = receive(NULL);
		while (reply.kind == STARTED)
			reply = receive(NULL);
		if (reply.kind == 0) { /* it could not come back to its own pid namespace */
			ends++;
			expect_end(CALL_FAILED);
			start(1);
		} else {
			CHECK(reply.call == request.call);
			if (reply.kind == ENDED)
				CHECK(is_end(&reply, 'e'));
			else
				CHECK(reply.kind == FAILED && reply.error == EIO && reply.where[0] != 0);
		}
		if (reply.kind == ENDED)
			expect_output(out, "err:e");
		else if (place == IN_PROGRAM)
			expect_output(out, "");
		else
			expect_closed(out); /* the program may have been on its way already */
		if (reply.kind == ENDED)
			break;
		run_well(step, 'e');
	}
	CHECK(ends == (place == IN_FORKSERVER));
	finish();
	return step - 1;
}

static void try_faults_of_the_kernel(void)
{
	struct request request = request_for(RUN, 1);

	start(1);
	shared->fail_wait = 1;
	expect_output(send_run(&request, 'o', FIRST_CGROUP, NULL), "err:o");
	expect_failed(1, "wait for program", ECHILD);
	shared->fail_wait = 2;
	expect_output(send_run(&request, 'o', FIRST_CGROUP, NULL), "err:o");
	expect_failed(1, "wait for init", ECHILD);
	shared->fail_watch = 1;
	close(send_run(&request, 'h', FIRST_CGROUP, NULL));
	expect_failed(1, "watch program", ENOSPC);
	shared->fail_watch = 2;
	expect_output(send_run(&request, 'o', FIRST_CGROUP, NULL), "err:o");
	expect_failed(1, "watch init", ENOSPC);
	run_well(2, 'o');
	finish();
}

/* A fault that a program told of a call that we took down ourselves is not the next call's. */
static void try_two_faults(uint64_t steps)
{
	start(1);
	shared->await_fault = 1;
	struct request request = request_for(RUN, IN_FORKSERVER + steps);
	request.tell_pids = 1;
	request.open_files = (uint64_t)1 << 40;
	expect_output(send_run(&request, 'e', FIRST_CGROUP, NULL), "");
	CHECK(receive(NULL).kind == STARTED); /* the last step is the second of these */
	expect_failed(request.call, "tell program", EIO);
	run_well(1, 'e');
	finish();
}

static void try_told_pids(void)
{
	struct request request = request_for(RUN, 1);
	pid_t init, program;

	start(1);
	request.tell_pids = 1;
	for (int kills_init = 0; kills_init < 2; kills_init++) {
		int out = send_run(&request, 'h', FIRST_CGROUP, NULL);
		CHECK(receive(&init).kind == STARTED);
		CHECK(receive(&program).kind == STARTED);
		await_program(out);
		CHECK(kill(kills_init ? init : program, SIGKILL) == 0);
		if (kills_init)
			expect_failed(1, "keep init", ESRCH);
		else
			expect_ended(1, 'k');
		expect_output(out, "");
	}
	finish();
}

static void try_full(void)
{
	int out[4];

	shared->places = 3;
	start(1);
	for (uint64_t round = 0; round < 2; round++) {
		for (uint64_t i = 0; i < 4; i++) {
			struct request request = request_for(RUN, i);
			out[i] = send_run(&request, 'h', FIRST_CGROUP, NULL);
		}
		expect_failed(3, "bad request", EINVAL);
		for (uint64_t i = 0; i < 3; i++) {
			await_program(out[i]);
			send_kill(i);
			send_kill(i);
			expect_ended(i, 'h');
			expect_output(out[i], "");
		}
		close(out[3]);
	}
	finish();
	shared->places = 0;
}

/* Programs of all kinds, faults of all kinds and kills, as fast as the socket takes them. */
static void try_many(void)
{
	static const char programs[] = "ecoh";
	uint64_t numbers[MANY];
	char kinds[MANY];
	int outs[MANY];

	start(1);
	for (uint64_t i = 0; i < MANY; i++) {
		kinds[i] = i % 6 < 4 ? programs[i % 6] : 0;
		numbers[i] = i % 6 == 4 ? IN_FORKSERVER + 1 + (i / 6) % 2 : i % 6 == 5 ? IN_PROGRAM + i / 6 + 1 : i;
		struct request request = request_for(RUN, numbers[i]);
		request.uid = FIRST_UID + i;
		request.processes = 16;
		outs[i] = send_run(&request, kinds[i] ? kinds[i] : 'e', FIRST_CGROUP, NULL);
		if (kinds[i] == 'h')
			send_kill(i);
	}
	for (int left = MANY; left > 0; left--) {
		struct reply reply = receive(NULL);
		int i = 0;
		while (i < MANY && !(outs[i] >= 0 && numbers[i] == reply.call))
			i++;
		CHECK(i < MANY);
		CHECK(reply.kind == (kinds[i] ? ENDED : FAILED));
		if (kinds[i])
			CHECK(is_end(&reply, kinds[i]));
		else
			CHECK(reply.error == EIO);
		char text[] = {'e', 'r', 'r', ':', kinds[i], 0};
		if (kinds[i] == 'h')
			close(outs[i]); /* killed at any moment */
		else
			expect_output(outs[i], kinds[i] ? text : "");
		outs[i] = -1;
	}
	finish();
}

/* Without an init no call begins, at whatever step that is met. AddressSanitizer mentions, once in each forkserver, that the
 * child which could not be init ends on a stack of its own. */
static void try_no_init(void)
{
	const char *const whole = init_path;
	struct request request = request_for(RUN, 1);

	init_path = "/dev/null";
	start(1);
	for (int i = 0; i < 20; i++) {
		int out = send_run(&request, 'h', FIRST_CGROUP, NULL);
		struct reply reply = receive(NULL);
		CHECK(reply.kind == FAILED && reply.call == 1 && reply.error != 0);
		expect_closed(out);
	}
	finish();
	init_path = whole;
}

/* The worker goes while programs run: they go with the forkserver. */
static void try_hangup(void)
{
	int outs[3];

	start(0);
	for (uint64_t i = 0; i < 3; i++) {
		struct request request = request_for(RUN, i);
		outs[i] = send_run(&request, i == 2 ? 'o' : 'h', FIRST_CGROUP, NULL);
	}
	expect_ended(2, 'o');
	expect_output(outs[2], "err:o");
	for (int i = 0; i < 2; i++)
		await_program(outs[i]);
	close(worker);
	expect_end(0);
	expect_output(outs[0], "");
	expect_output(outs[1], "");
}

int main(int argc, char **argv)
{
	const struct rlimit no_core = {0, 0};
	struct rlimit files;

	CHECK(argc == 2 && geteuid() == 0);
	init_path = argv[1];
	setbuf(stdout, NULL); /* else each fork holds, and writes, a copy */
	CHECK(setrlimit(RLIMIT_CORE, &no_core) == 0);
	CHECK(getrlimit(RLIMIT_NOFILE, &files) == 0);
	most_files = files.rlim_max;
	/* Some heap that can be made a huge page. */
	CHECK(mmap(NULL, 8 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0) != MAP_FAILED);
	shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CHECK(shared != MAP_FAILED);
	try_other_protocols();
	for (int kind = 0; kind < 4; kind++) {
		has_user_namespaces = kind & 1;
		has_loopback = kind >> 1;
		try_programs();
		try_bad_requests();
		uint64_t in_program = try_steps(IN_PROGRAM), in_forkserver = try_steps(IN_FORKSERVER);
		try_faults_of_the_kernel();
		try_two_faults(in_forkserver);
		try_told_pids();
		try_full();
		try_many();
		try_no_init();
		try_hangup();
		printf("user namespaces %d, loopback %d: %d steps in the program and %d in the forkserver fail well\n",
		       has_user_namespaces, has_loopback, (int)in_program, (int)in_forkserver);
	}
	return 0;
}
