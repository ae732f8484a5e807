/* PID 1 of one call's pid namespace: reaps what is orphaned there, for ever.
 *
 * Why it exists: PID 1 ignores signals at their default action, so a program that ran as PID 1 could crash and
 * look like a success. With this in front the program is PID 2 and behaves like any process. It is half a KiB,
 * static and free of libc, because a second Python as PID 1 costs more than all the walls of the call together.
 *
 * It ends only by SIGKILL from the forkserver. The kernel then kills everything in the namespace, and lets the
 * forkserver's wait return only when nothing of the call is left.
 */

enum { SIGCHLD = 17, SIG_BLOCK = 0, WNOHANG = 1 };

#if defined(__x86_64__)
enum { SYS_rt_sigprocmask = 14, SYS_wait4 = 61, SYS_rt_sigtimedwait = 128 };
static long system_call(long number, long a, long b, long c, long d)
{
	long result;
	register long r10 __asm__("r10") = d;
	__asm__ volatile("syscall"
			 : "=a"(result)
			 : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10)
			 : "rcx", "r11", "memory");
	return result;
}
#elif defined(__aarch64__)
enum { SYS_rt_sigprocmask = 135, SYS_rt_sigtimedwait = 137, SYS_wait4 = 260 };
static long system_call(long number, long a, long b, long c, long d)
{
	register long x8 __asm__("x8") = number;
	register long x0 __asm__("x0") = a;
	register long x1 __asm__("x1") = b;
	register long x2 __asm__("x2") = c;
	register long x3 __asm__("x3") = d;
	__asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3) : "memory");
	return x0;
}
#else
#error "the jail knows x86-64 and aarch64"
#endif

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
