/* Remembers which process sent a signal: Python's handlers are not told.
 *
 * listen() puts a handler in front of Python's. It keeps the sender's pid and user and the beginning of /proc/PID/stat, which
 * is read at once because a sender such as kill(1) ends a moment later. Then it calls Python's handler, as if it were not there.
 * sigwaitinfo() and signalfd() are no way to the same end: they need blocked signals, and the ranks would inherit the mask.
 *
 * The handler calls only async-signal-safe functions. Processes that are started later do not inherit it, because exec resets
 * handlers. Limited API of Python 3.10.
 */

#include <Python.h>

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#define SIGNALS 65
#define STAT_MAX 128 /* pid, name, state and the parent's pid fit */

typedef struct {
    void (*_Atomic next)(int); /* Python's handler */
    atomic_flag is_taken;      /* the first signal is kept until take() has returned it */
    atomic_int is_ready;
    int code;
    pid_t pid;
    uid_t uid;
    ssize_t stat_size;
    char stat[STAT_MAX];
} sender;

static sender senders[SIGNALS];

static ssize_t
read_stat(pid_t pid, char *stat)
{
    char path[40];
    char *at = path + sizeof path - sizeof "/stat";
    memcpy(at, "/stat", sizeof "/stat");
    do
        *--at = (char)('0' + pid % 10);
    while (pid /= 10);
    at -= strlen("/proc/");
    memcpy(at, "/proc/", strlen("/proc/"));
    int file = open(at, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return 0;
    ssize_t size = read(file, stat, STAT_MAX);
    close(file);
    return size < 0 ? 0 : size;
}

static void
on_signal(int number, siginfo_t *info, void *context)
{
    (void)context;
    sender *from = &senders[number];
    if (!atomic_flag_test_and_set(&from->is_taken)) {
        int error = errno;
        int is_process = info->si_code == SI_USER || info->si_code == SI_QUEUE || info->si_code == SI_TKILL;
        from->code = info->si_code;
        from->pid = is_process ? info->si_pid : 0;
        from->uid = is_process ? info->si_uid : 0;
        from->stat_size = from->pid > 0 ? read_stat(from->pid, from->stat) : 0;
        atomic_store(&from->is_ready, 1);
        errno = error;
    }
    atomic_load(&from->next)(number);
}

static int
number_from(PyObject *argument)
{
    long number = PyLong_AsLong(argument);
    if (number > 0 && number < SIGNALS)
        return (int)number;
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "no such signal");
    return -1;
}

/* The GIL keeps signal.signal() from changing the handler in between. */
static PyObject *
listen_to(PyObject *self, PyObject *argument)
{
    (void)self;
    int number = number_from(argument);
    if (number < 0)
        return NULL;
    sender *from = &senders[number];
    struct sigaction action;
    if (sigaction(number, NULL, &action))
        return PyErr_SetFromErrno(PyExc_OSError);
    if (action.sa_flags & SA_SIGINFO)
        return PyBool_FromLong(action.sa_sigaction == on_signal);
    void (*known)(int) = atomic_load(&from->next);
    /* another handler than before may call ours, which would call it again */
    if (action.sa_handler == SIG_DFL || action.sa_handler == SIG_IGN || (known && known != action.sa_handler))
        Py_RETURN_FALSE;
    atomic_store(&from->next, action.sa_handler);
    action.sa_sigaction = on_signal;
    action.sa_flags |= SA_SIGINFO;
    if (sigaction(number, &action, NULL))
        return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_TRUE;
}

static PyObject *
take(PyObject *self, PyObject *argument)
{
    (void)self;
    int number = number_from(argument);
    if (number < 0)
        return NULL;
    sender *from = &senders[number];
    if (!atomic_load(&from->is_ready))
        Py_RETURN_NONE;
    PyObject *taken = Py_BuildValue("(ilLN)", from->code, (long)from->pid, (long long)from->uid,
                                    PyBytes_FromStringAndSize(from->stat, from->stat_size)); /* "y#" of 3.13's headers fails before 3.13 */
    atomic_store(&from->is_ready, 0);
    atomic_flag_clear(&from->is_taken);
    return taken;
}

static PyMethodDef METHODS[] = {
    {"listen", listen_to, METH_O,
     "listen(number: int) -> bool. Whether the senders of this signal are remembered: only where Python handles it."},
    {"take", take, METH_O,
     "take(number: int) -> tuple[int, int, int, bytes] | None. Code, pid, user and /proc/PID/stat of the first sender since the"
     " last call."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_senders", "Which process sent a signal.", -1, METHODS,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC
PyInit__senders(void)
{
    return PyModule_Create(&MODULE);
}
