/* Makes the warm heap cheap to fork, and to look at in a child. Loaded by forkserver.py.
 *
 * It lies together. CPython takes its memory in pieces of 1 MiB, wherever the kernel puts them, which is between the
 * libraries that are loaded meanwhile. Pieces from one place are one mapping and become huge pages (`collapse_heap` in
 * fork.c), so that with all libraries loaded a fork copies half as many page table entries.
 *
 * It is immortal. CPython counts the references to an object in the object, so to read one is to write it, and a write
 * after a fork copies the page. From 3.12 on (PEP 683) an object whose count is all ones is immortal: nobody counts it
 * any more, and it is never freed.
 *
 * What is used of CPython is declared by hand, for the host may have no headers of it. forkserver.py makes objects
 * immortal under the versions in which they look like that, and under no other.
 */

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

struct object {
	uint32_t count, above; /* one field of 64 bits, little endian on all processors that we know */
	void *type;
};

typedef int (*visitor)(struct object *, void *);
typedef int (*traverser)(struct object *, visitor, void *);

extern char PyFrame_Type[], PyGen_Type[], PyCoro_Type[], PyAsyncGen_Type[], PyCode_Type[];
extern ptrdiff_t PyList_Size(struct object *);
extern struct object *PyList_GetItem(struct object *, ptrdiff_t);
extern struct object *PyObject_GetAttrString(struct object *, const char *);
extern void Py_DecRef(struct object *);
extern int PyObject_IS_GC(struct object *);
extern void *PyType_GetSlot(void *, int);

struct arena_allocator { /* PyObjectArenaAllocator */
	void *context;
	void *(*alloc)(void *, size_t);
	void (*free)(void *, void *, size_t);
};
extern void PyObject_SetArenaAllocator(struct arena_allocator *);

enum { ARENA = 1 << 20, HUGE_PAGE = 2 << 20, N_ARENAS = 1024 };
static char *first_arena, *next_arena, *last_arena;
static char *freed[N_ARENAS]; /* to be used again, so that no holes stay */
static size_t n_freed;

static void *allocate_arena(void *unused, size_t size)
{
	(void)unused;
	char *place = n_freed ? freed[n_freed - 1] : next_arena;
	if (size == ARENA && place < last_arena && mprotect(place, ARENA, PROT_READ | PROT_WRITE) == 0) {
		if (n_freed)
			n_freed--;
		else
			next_arena += ARENA;
		return place;
	}
	/* A program that wants that much, or more than its limit: as CPython does it. */
	void *arena = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	return arena == MAP_FAILED ? NULL : arena;
}

static void free_arena(void *unused, void *arena, size_t size)
{
	(void)unused;
	if ((char *)arena >= first_arena && (char *)arena < last_arena) {
		madvise(arena, size, MADV_DONTNEED);
		mprotect(arena, size, PROT_NONE);
		freed[n_freed++] = arena;
	} else {
		munmap(arena, size); /* also one that CPython got before us, in the same way */
	}
}

/* Lets all memory that CPython takes from now on lie in one place. Only addresses are reserved, which are no data to
 * RLIMIT_DATA and no memory to a cgroup. Returns 0, or -1 when there are no addresses. */
int keep_together(void)
{
	struct arena_allocator ours = {NULL, allocate_arena, free_arena};
	size_t size = (size_t)N_ARENAS * ARENA;
	char *start = mmap(NULL, size + HUGE_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	if (start == MAP_FAILED)
		return -1;
	first_arena = next_arena = (char *)(((uintptr_t)start + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
	last_arena = first_arena + size;
	PyObject_SetArenaAllocator(&ours);
	return 0;
}

enum { TP_TRAVERSE = 71 }; /* of CPython's stable ABI */
static const uint32_t IMMORTAL = UINT32_MAX;

/* What has been made immortal and not been looked into yet. */
static struct object **waiting;
static size_t n_waiting, room;

static int visit(struct object *object, void *unused)
{
	(void)unused;
	/* What runs, or waits in the middle of a function, ends by its count. */
	if (object->count == IMMORTAL || object->type == PyFrame_Type || object->type == PyGen_Type ||
	    object->type == PyCoro_Type || object->type == PyAsyncGen_Type)
		return 0;
	if (n_waiting == room) {
		room = room ? 2 * room : 4096;
		struct object **larger = realloc(waiting, room * sizeof *waiting);
		if (!larger)
			return -1;
		waiting = larger;
	}
	object->count = IMMORTAL;
	waiting[n_waiting++] = object;
	return 0;
}

/* The collector does not look into code, for it cannot be part of a circle. */
static int visit_code(struct object *code)
{
	static const char *const parts[] = {"co_consts", "co_names", "co_name", "co_qualname", "co_filename",
					    "co_linetable", "co_exceptiontable"};

	for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
		struct object *part = PyObject_GetAttrString(code, parts[i]);
		if (!part || visit(part, NULL) < 0)
			return -1;
		Py_DecRef(part);
	}
	return 0;
}

/* Makes all objects of the list immortal and what can be reached from them. Returns 0, or -1 when there is no memory. */
int make_immortal(struct object *list)
{
	for (ptrdiff_t i = 0; i < PyList_Size(list); i++)
		if (visit(PyList_GetItem(list, i), NULL) < 0)
			return -1;
	while (n_waiting) {
		struct object *object = waiting[--n_waiting];
		traverser traverse = NULL;
		if (PyObject_IS_GC(object))
			traverse = (traverser)PyType_GetSlot(object->type, TP_TRAVERSE);
		if ((traverse && traverse(object, visit, NULL) < 0) ||
		    (object->type == PyCode_Type && visit_code(object) < 0))
			return -1;
	}
	free(waiting);
	return 0;
}
