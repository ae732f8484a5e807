/* PID 1 of one call's pid namespace: reaps what is orphaned there, for ever.
 *
 * Why it exists: PID 1 ignores signals at their default action, so a program that ran as PID 1 could crash and
 * look like a success. With this in front the program is PID 2 and behaves like any process. It is half a KiB,
 * static and free of libc, because a second Python as PID 1 costs more than all the walls of the call together.
 *
 * It ends only by SIGKILL from the forkserver. The kernel then kills everything in the namespace, and lets the
 * forkserver's wait return only when nothing of the call is left.
 */

#include "bare.h"

enum { WNOHANG = 1 };

void _start(void);
void _start(void)
{
	/* Blocked, SIGCHLD is kept for us to wait for; at its default action it would be dropped, and an orphan
	 * that ended while we slept would stay a zombie and count against the call's processes. */
	static const unsigned long child_ended = 1UL << (SIGCHLD - 1);

	system_call(SYS_rt_sigprocmask, SIG_BLOCK, (long)&child_ended, 0, sizeof child_ended);
	for (;;) {
		while (system_call(SYS_wait4, -1, 0, WNOHANG, 0) > 0)
			;
		system_call(SYS_rt_sigtimedwait, (long)&child_ended, 0, 0, sizeof child_ended);
	}
}
