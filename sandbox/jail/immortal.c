/* Makes the warm heap immortal, so that a child may look at it without copying it. Loaded by forkserver.py.
 *
 * CPython counts the references to an object in the object, so to read one is to write it, and a write after a fork
 * copies the page. From 3.12 on (PEP 683) an object whose count is all ones is immortal: nobody counts it any more, and it
 * is never freed. Declared by hand what is used of CPython, for the host may have no headers of it; forkserver.py calls
 * this under the versions that look like that and under no other.
 */

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

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
