/* Feeds the forkserver whatever can arrive on its control socket: a libFuzzer target.
 *
 * fork.c is part of this program, compiled with INJECT_FAULTS. Sockets, descriptors, ancillary data and epoll are real, so
 * that nothing arrives here which the kernel would not deliver. What would make, end or wait for processes and namespaces
 * is played. An input is a list of events: messages, well formed or not, ends of programs and of inits, faults told by
 * children. Beyond memory errors, these are faults: a request to run that is not answered exactly once, a reply that is
 * torn, a call or a descriptor that stays behind.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(condition)                                                                          \
	do {                                                                                      \
		if (!(condition)) {                                                               \
			fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
			abort();                                                                  \
		}                                                                                 \
	} while (0)

static int handle = -1; /* every played process has a copy of this */
static int fails; /* the next thing that is played */
static jmp_buf end_of_forkserver;

static int played(int result)
{
	int failed = fails;

	fails = 0;
	errno = EAGAIN;
	return failed ? -1 : result;
}

static int played_clone(int (*function)(void *), int *handle_on_it)
{
	(void)function;
	if (played(0) < 0)
		return -1;
	*handle_on_it = dup(handle);
	return getpid();
}

static pid_t played_wait(pid_t pid, int *status, struct rusage *usage)
{
	if (status)
		*status = 0;
	if (usage)
		memset(usage, 0, sizeof *usage);
	return played(pid);
}

static long played_syscall(long number, ...)
{
	return number == SYS_pidfd_open && played(0) == 0 ? dup(handle) : played(0);
}

static _Noreturn void end(int status)
{
	(void)status;
	longjmp(end_of_forkserver, 1);
}

#define clone(function, stack, flags, argument, handle_on_it) \
	((void)(stack), (void)(flags), (void)(argument), played_clone(function, handle_on_it))
#define fork() played(getpid())
#define kill(pid, number) ((void)(pid), (void)(number), played(0)) /* they all have our pid */
#define setns(fd, kind) ((void)(fd), played(0))
#define unshare(kinds) played(0)
#define wait4(pid, status, options, usage) played_wait(pid, status, usage)
#define waitpid(pid, status, options) played_wait(pid, status, NULL)
#define syscall played_syscall
#define _exit end
#include "../../sandbox/jail/fork.c"
#undef syscall

enum { MOST_CALLS = 24 };

void PyOS_BeforeFork(void) {}
void PyOS_AfterFork_Parent(void) {}
void PyOS_AfterFork_Child(void) {}

/* ---- the input, read as numbers ---- */

struct input {
	const uint8_t *next;
	size_t left;
};

static void take(struct input *input, void *target, size_t size)
{
	size_t there = size < input->left ? size : input->left;

	memset(target, 0, size);
	memcpy(target, input->next, there);
	input->next += there;
	input->left -= there;
}

static uint8_t take_byte(struct input *input)
{
	uint8_t byte;

	take(input, &byte, 1);
	return byte;
}

/* A small number, so that messages meet; or one that makes a step fail. */
static uint64_t take_number(struct input *input)
{
	uint8_t byte = take_byte(input);
	return byte < 192 ? byte % 16 : IN_FORKSERVER + byte % 16;
}

/* ---- the worker ---- */

static struct setup setup;
static int worker;
static uint64_t expected, answered; /* calls */

/* Sends what the input says, and tells whether the kernel took it. */
static int send_message(struct input *input, const void *content, size_t size)
{
	union {
		char space[256];
		struct cmsghdr align;
	} control;
	struct iovec part = {(void *)(uintptr_t)content, size};
	struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control};
	uint8_t headers = take_byte(input) % 4;

	memset(&control, 0, sizeof control);
	for (size_t place = 0; headers > 0; headers--) {
		uint8_t kind = take_byte(input), count = take_byte(input) % (MAX_FDS + 3);
		struct ucred credentials = {getpid(), getuid(), getgid()};
		size_t length = kind % 8 == 7 ? sizeof credentials : count * sizeof(int);
		if (place + CMSG_SPACE(length) > sizeof control)
			break;
		struct cmsghdr *header = (struct cmsghdr *)(void *)(control.space + place);
		header->cmsg_level = kind % 8 == 6 ? kind : SOL_SOCKET;
		header->cmsg_type = kind % 8 == 7 ? SCM_CREDENTIALS : kind % 8 == 5 ? kind : SCM_RIGHTS;
		header->cmsg_len = CMSG_LEN(length);
		for (uint8_t i = 0; i < count && kind % 8 != 7; i++)
			memcpy(CMSG_DATA(header) + i * sizeof(int), &handle, sizeof handle);
		if (kind % 8 == 7)
			memcpy(CMSG_DATA(header), &credentials, sizeof credentials);
		place += CMSG_SPACE(length);
		message.msg_controllen = place;
	}
	return sendmsg(worker, &message, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0;
}

static void read_replies(void)
{
	struct reply reply;
	ssize_t size;

	while ((size = recv(worker, &reply, sizeof reply, MSG_DONTWAIT)) > 0) {
		CHECK(size == sizeof reply);
		CHECK(memchr(reply.where, 0, sizeof reply.where) != NULL);
		CHECK(reply.kind == ENDED || reply.kind == FAILED || reply.kind == STARTED);
		CHECK((reply.kind == FAILED) == (reply.where[0] != 0));
		answered += reply.kind != STARTED;
	}
	CHECK(answered <= expected);
}

static int n_running(void)
{
	int running = 0;

	for (int i = 0; i < n_calls; i++)
		running += calls[i].used;
	return running;
}

static void end_call(int index)
{
	if (calls[index].used && calls[index].program > 0)
		program_ended(setup.control, &calls[index], index);
	else if (calls[index].used)
		init_ended(setup.control, &calls[index]);
}

/* Returns whether the forkserver goes on. */
static int deliver(struct input *input, const void *content, size_t size)
{
	struct request request;

	if (!send_message(input, content, size))
		return 1;
	memcpy(&request, content, size < sizeof request ? size : sizeof request);
	expected += size == sizeof request && request.kind == RUN;
	fails = take_byte(input) % 16 == 15;
	int outcome = read_request(&setup);
	fails = 0;
	CHECK(outcome == -1 || (outcome == WORKER_GONE && size == 0));
	return outcome == -1;
}

/* Returns whether the forkserver goes on. */
static int happen(struct input *input)
{
	union {
		struct request request;
		char bytes[sizeof(struct request) + 8];
	} message;
	struct fault fault;
	size_t length;
	int on;

	memset(&message, 0, sizeof message);
	switch (take_byte(input) % 8) {
	case 0:
	case 1:
		if (n_running() == MOST_CALLS)
			return 1;
		message.request = (struct request){.kind = RUN, .call = take_number(input)};
		message.request.tell_pids = take_byte(input) % 2;
		length = take_byte(input) % 16 == 15 ? sizeof message : sizeof message.request;
		return deliver(input, &message, length);
	case 2:
		message.request = (struct request){.kind = KILL, .call = take_number(input)};
		return deliver(input, &message, sizeof message.request);
	case 3:
		length = take_byte(input) % (sizeof message.bytes + 1);
		take(input, message.bytes, length);
		return n_running() == MOST_CALLS || deliver(input, message.bytes, length);
	case 4:
	case 5:
		fails = take_byte(input) % 16 == 15;
		end_call(take_byte(input) % MOST_CALLS);
		fails = 0;
		return 1;
	case 6:
		take(input, &fault, sizeof fault);
		fault.where[0] = 'x';
		fault.where[sizeof fault.where - 1] = 0; /* so snprintf leaves it, in the child */
		CHECK(write(fault_write, &fault, sizeof fault) == sizeof fault);
		return 1;
	default:
		on = take_byte(input) % 2;
		CHECK(setsockopt(setup.control, SOL_SOCKET, SO_PASSCRED, &on, sizeof on) == 0);
		return 1;
	}
}

/* ---- libFuzzer ---- */

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
	int pipe_fds[2];

	(void)argc;
	(void)argv;
	handle = eventfd(0, EFD_CLOEXEC);
	epoll = epoll_create1(EPOLL_CLOEXEC);
	CHECK(handle >= 0 && epoll >= 0 && pipe2(pipe_fds, O_CLOEXEC | O_NONBLOCK) == 0);
	fault_read = pipe_fds[0];
	fault_write = pipe_fds[1];
	for (int i = 0; i < MOST_CALLS; i++)
		net_namespaces[i] = dup(handle);
	return 0;
}

/* All events of an input, then the end of what still runs. Returns whether the forkserver lived to see it. */
static int live(struct input *input)
{
	if (setjmp(end_of_forkserver) != 0)
		return 0;
	while (input->left > 0) {
		int goes_on = happen(input);
		read_replies();
		if (!goes_on)
			return 0;
	}
	while (n_running() > 0) {
		for (int i = 0; i < n_calls; i++)
			end_call(i);
		read_replies();
	}
	CHECK(answered == expected);
	return 1;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct input input = {data, size};
	int pair[2];

	CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0);
	worker = pair[0];
	setup = (struct setup){.control = pair[1], .init_exe = -1};
	expected = answered = 0;
	int first_free = dup(handle);
	close(first_free);
	int has_lived = live(&input);
	fails = 0;
	for (int i = 0; i < n_calls; i++)
		if (calls[i].used)
			forget(&calls[i]); /* where the forkserver ended before its calls */
	read_faults(); /* nobody's, now */
	int free_now = dup(handle);
	CHECK(!has_lived || free_now == first_free);
	CHECK(close_range((unsigned)first_free, ~0U, 0) == 0);
	close(pair[0]);
	close(pair[1]);
	return 0;
}
