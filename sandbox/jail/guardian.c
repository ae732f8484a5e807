/* The guardian of one call at level `process`: the parent of the program, and what stands in for a pid namespace.
 *
 *   forkserver ──► guardian ──► program ──► whatever it starts
 *
 * The forkserver makes it (fork_guarded in fork.c) as a subreaper with SIGCHLD and SIGTERM blocked, and with the
 * program as its child; then it executes this file, for the reasons that init.c gives. Whatever the program starts is
 * therefore ours to wait for, whoever its parent was.
 *
 * When the program has ended, or SIGTERM says that the call must (the forkserver sends it for KILL, the kernel when the
 * forkserver dies), one kill(-1) ends the rest. It reaches all processes that we may signal, and no fork runs past it:
 * the kernel takes the lock that a fork needs, and a fork that has a signal pending gives up. What we may signal is
 *   as root: what runs as the slot's uid, which we take as our effective one for that moment. A signal to us is compared
 *     with our real and our saved uid, which are the next one, nobody's, and root: so the program cannot kill us
 *     first, and neither can another call's;
 *   as an ordinary user: what is in our Landlock domain, which is the program's and everything below (Linux 6.12).
 * Then we wait until nobody is left, write how the program ended into the forkserver's fault pipe, and end. The program
 * cannot signal us, by the same two reasons. Our own CPU time and that of all whom we waited for reaches the
 * forkserver with our end.
 *
 * Arguments: the call's place in the forkserver's table, the program's pid, our pid's parent, and the uid; "-" for none.
 * Descriptor 0 is the fault pipe. Descriptors 1 and 2, the worker's pipe for messages, are held and not used: the worker
 * reads their end of file when the last guardian is gone.
 */

#include "bare.h"

enum { WNOHANG = 1, WALL = 0x40000000, PR_SET_PDEATHSIG = 1 };

/* struct fault of fork.c; no name of a failed step, so `error` is the wait status. */
struct report {
	unsigned long index;
	long wait_status;
	char where[32];
};

static long number(const char *text)
{
	long value = 0;

	if (*text == '-')
		return -1;
	while (*text)
		value = value * 10 + (*text++ - '0');
	return value;
}

/* Ends everything of the call. The program is named as well: while its walls go up it is still root. */
static void end_all(long program, long uid)
{
	if (program > 0)
		system_call(SYS_kill, program, SIGKILL, 0, 0);
	if (uid < 0) {
		system_call(SYS_kill, -1, SIGKILL, 0, 0);
	} else if (system_call(SYS_setresuid, uid + 1, uid, 0, 0) == 0) {
		/* By ourselves: where a bound on processes is reached, nobody could be started to do it. */
		system_call(SYS_kill, -1, SIGKILL, 0, 0);
		system_call(SYS_setresuid, 0, 0, 0, 0);
		system_call(SYS_prctl, PR_SET_PDEATHSIG, SIGTERM, 0, 0); /* a change of user clears it */
	}
}

void guard(long *stack);
void guard(long *stack)
{
	static const unsigned long awaited = 1UL << (SIGCHLD - 1) | 1UL << (SIGTERM - 1);
	static struct report report;
	char **arguments = (char **)(stack + 1);
	long program = number(arguments[2]), uid = number(arguments[4]);
	int status, signal = 0;

	report.index = (unsigned long)number(arguments[1]);
	system_call(SYS_prctl, PR_SET_PDEATHSIG, SIGTERM, 0, 0);
	if (system_call(SYS_getppid, 0, 0, 0, 0) != number(arguments[3]))
		signal = SIGTERM; /* it died before we asked to be told */
	for (;;) {
		long pid;

		if (signal == SIGTERM)
			end_all(program, uid);
		while ((pid = system_call(SYS_wait4, -1, (long)&status, WNOHANG | WALL, 0)) > 0)
			if (pid == program) {
				report.wait_status = status;
				program = 0;
				end_all(program, uid);
			}
		if (pid < 0)
			break; /* nobody is left */
		signal = (int)system_call(SYS_rt_sigtimedwait, (long)&awaited, 0, 0, sizeof awaited);
	}
	system_call(SYS_write, 0, (long)&report, sizeof report, 0);
	system_call(SYS_exit, 0, 0, 0, 0);
}

#if defined(__x86_64__)
__asm__(".globl _start\n_start: mov %rsp, %rdi\n and $-16, %rsp\n call guard\n");
#else
__asm__(".globl _start\n_start: mov x0, sp\n b guard\n");
#endif
