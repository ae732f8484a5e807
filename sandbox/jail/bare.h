/* System calls without libc, for the tiny programs that stand in front of each call (init.c, guardian.c): they are
 * started for every call, and loading a libc would cost more than all that they do. */

#if defined(__x86_64__)
enum {
	SYS_rt_sigprocmask = 14,
	SYS_write = 1,
	SYS_getppid = 110,
	SYS_setresuid = 117,
	SYS_exit = 60,
	SYS_wait4 = 61,
	SYS_kill = 62,
	SYS_rt_sigtimedwait = 128,
	SYS_prctl = 157
};
static long system_call(long number, long a, long b, long c, long d)
{
	long result;
	register long r10 __asm__("r10") = d;
	register long r8 __asm__("r8") = 0;
	__asm__ volatile("syscall"
			 : "=a"(result)
			 : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8)
			 : "rcx", "r11", "memory");
	return result;
}
#elif defined(__aarch64__)
enum {
	SYS_rt_sigprocmask = 135,
	SYS_write = 64,
	SYS_getppid = 173,
	SYS_setresuid = 147,
	SYS_exit = 93,
	SYS_wait4 = 260,
	SYS_kill = 129,
	SYS_rt_sigtimedwait = 137,
	SYS_prctl = 167
};
static long system_call(long number, long a, long b, long c, long d)
{
	register long x8 __asm__("x8") = number;
	register long x0 __asm__("x0") = a;
	register long x1 __asm__("x1") = b;
	register long x2 __asm__("x2") = c;
	register long x3 __asm__("x3") = d;
	register long x4 __asm__("x4") = 0;
	__asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4) : "memory");
	return x0;
}
#else
#error "the jail knows x86-64 and aarch64"
#endif

enum { SIG_BLOCK = 0, SIGKILL = 9, SIGTERM = 15, SIGCHLD = 17 };
