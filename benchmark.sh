#!/usr/bin/env bash
# A grid of algorithms x tasks x seeds, on this machine or on a SLURM cluster.
set -uo pipefail

help() {
  cat <<'END'
usage: [VARIABLE=value ...] ./benchmark.sh

Trains each of ALGOS on each of ENVS with each of SEEDS, by default the paper's grid. Call it again to go on: finished
runs are skipped, interrupted ones resume from their checkpoints. Ctrl-C stops all at checkpoints, a second one at once.

  ALGOS       mdpo_onpolicy trpo ppo mdpo_offpolicy mdpo_tsallis sac
  ENVS        Hopper-v4 Walker2d-v4 HalfCheetah-v4 Ant-v4 Humanoid-v4 HumanoidStandup-v4
  SEEDS       1 2 3 4 5
  PRESET      loaded-gae (on-policy only), loaded, minimal; default: loaded-gae on-policy, loaded off-policy
  STEPS       of each run; default: on-policy 10000000, off-policy 1000000, on Ant and Humanoid 3000000
  EXTRA       further flags of the scripts, such as "--tsallis-q 1.5"; they become part of the runs' names
  WORKERS     runs at once, one thread each; default: the cores, with SLURM no limit
  WANDB_MODE  offline (default), online, disabled;  WANDB_PROJECT  mdpo
  PYTHON      python
  DRY_RUN=1   print the commands (with SLURM=1 the batch script) and run nothing
  SLURM=1     submit the unfinished runs as one job array that is requeued and resumed after preemption and at the
              time limit. PARTITION TIME MEM (4G) GPUS (none) are sbatch's; SBATCH_ACCOUNT and the like work too

A run is named ENV__ALGO__PRESET__STEPS__SEED, with __EXTRA if there is any. It lives in runs/NAME, where the file
`finished` appears when it is; what it prints goes to runs/NAME.log.
Exit status: 0 all finished (SLURM: submitted), 1 not all, 2 cannot work as asked, 128 + signal if stopped.

  DRY_RUN=1 ./benchmark.sh
  ALGOS="ppo mdpo_onpolicy" ENVS=Hopper-v4 SEEDS="1 2 3" STEPS=1000000 ./benchmark.sh
  ALGOS=mdpo_tsallis EXTRA="--tsallis-q 1.5" WANDB_MODE=online ./benchmark.sh
  SLURM=1 PARTITION=long TIME=12:00:00 WORKERS=30 ./benchmark.sh
END
}

# -------------------------------------------------------------------------------------------------- what is asked for
refuse() {
  echo "benchmark.sh: $*" >&2
  exit 2
}
one_of() { # VARIABLE VALUE KNOWN...
  [[ " ${*:3} " == *" $2 "* ]] || refuse "$1 $2 is not known; these are: ${*:3}."
}
[[ ${1-} == --help || ${1-} == -h ]] && help && exit
(($# == 0)) || refuse "unknown argument $1: settings are variables in front, as --help shows."
((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)) || refuse "bash 4.4 or newer is needed, this is $BASH_VERSION."

on_policy="mdpo_onpolicy trpo ppo" off_policy="mdpo_offpolicy mdpo_tsallis sac"
PRESET=${PRESET-} STEPS=${STEPS-} WORKERS=${WORKERS-} WANDB_MODE=${WANDB_MODE:-offline} PYTHON=${PYTHON:-python}
DRY_RUN=${DRY_RUN:-0} SLURM=${SLURM:-0}
[[ $PRESET == loaded-gae ]] && having_preset=$on_policy || having_preset="$on_policy $off_policy"
read -rd '' -a algos <<<"${ALGOS:-$having_preset}"
read -rd '' -a envs <<<"${ENVS:-Hopper-v4 Walker2d-v4 HalfCheetah-v4 Ant-v4 Humanoid-v4 HumanoidStandup-v4}"
read -rd '' -a seeds <<<"${SEEDS:-1 2 3 4 5}"
read -rd '' -a extra <<<"${EXTRA-}"
((${#algos[@]} * ${#envs[@]} * ${#seeds[@]})) || refuse "ALGOS, ENVS and SEEDS must not be blank."
[[ ! $PRESET ]] || one_of PRESET "$PRESET" loaded-gae loaded minimal
one_of WANDB_MODE "$WANDB_MODE" offline online disabled
here=$(dirname "$0")/ here=${here#./}
for algo in "${algos[@]}"; do
  # shellcheck disable=SC2086 # a list of words
  one_of "algorithm" "$algo" $on_policy $off_policy
  [[ " $having_preset " == *" $algo "* ]] || refuse "PRESET $PRESET is of the on-policy algorithms, and $algo is not."
  [[ -f $here$algo.py ]] || refuse "there is no $algo.py beside this script, in ${here:-.}"
done
for seed in "${seeds[@]}"; do
  [[ $seed =~ ^(0|[1-9][0-9]{0,8})$ ]] || refuse "SEEDS must be whole numbers such as 1 2 3, and $seed is not."
done
for variable in ALGO ENV_ID SEED; do
  [[ ! ${!variable-} ]] || refuse "$variable is set, but it is ALGOS, ENVS and SEEDS that this script reads."
done
for variable in STEPS WORKERS; do
  [[ ${!variable} =~ ^([1-9][0-9]{0,14})?$ ]] || refuse "$variable must be a positive whole number, not ${!variable}."
done
[[ $DRY_RUN$SLURM =~ ^[01][01]$ ]] || refuse "DRY_RUN and SLURM must be 0 or 1."
for word in "${extra[@]}"; do
  flag=${word%%=*} flag=${flag//_/-}
  [[ ! $flag =~ ^--(env-id|seed|preset|total-timesteps|run-name|(no-)?resume|evaluate|wandb-mode|wandb-project)$ ]] ||
    refuse "EXTRA must not hold $flag: this script sets it."
done
slug="${extra[*]}" slug=${slug#"${slug%%[!-]*}"} slug=${slug// --/_} slug=${slug//[^A-Za-z0-9._-]/-}
((${#slug} <= 70)) || refuse "EXTRA is too long to be part of a name (70 characters)."
python=$(command -v "$PYTHON") || refuse "there is no $PYTHON: set PYTHON, or activate the virtual environment."
# The scripts say best what they cannot do: unknown tasks and flags, numbers out of range, missing packages.
problem=$("$python" - "${here:-.}" "${algos[*]}" "${envs[*]}" ${PRESET:+--preset "$PRESET"} \
  ${STEPS:+--total-timesteps "$STEPS"} "${extra[@]}" 2>&1 <<'END'
import sys, warnings
from importlib import import_module
from importlib.util import find_spec
folder, algos, envs, *flags = sys.argv[1:]
missing = [name for name in "gymnasium mujoco numpy torch tqdm tyro wandb".split() if not find_spec(name)]
if missing:
    sys.exit(f"{sys.executable} has no {', '.join(missing)}: `pip install .` installs what is needed.")
sys.path.insert(0, folder)
for algo in algos.split():
    sys.argv[0], script = f"{algo}.py", import_module(algo)
    warnings.simplefilter("ignore")
    for env_id in envs.split():
        script.parse_args(["--env-id", env_id, *flags])
END
) || refuse "$problem"

# ----------------------------------------------------------------------------------- the runs, and which to start here
declare -A queued=() elsewhere=() # name of a run -> who has it; elsewhere: of the runs asked for, instead of us
if [[ -d runs/slurm ]] && command -v squeue >/dev/null; then
  queue=$(squeue --me --noheader --array --format="%j %K") || refuse "squeue does not say what is still queued."
  while read -r job index; do # an array is named after its list of runs; lists of other folders are not here
    [[ -f runs/slurm/$job ]] || continue
    mapfile -t -s "$index" -n 1 run <"runs/slurm/$job"
    [[ ${run[0]-} =~ --run-name\ ([^ ]+) ]] && queued[${BASH_REMATCH[1]}]="it is in SLURM's queue, array $job"
  done <<<"$queue"
elif [[ -d runs/slurm ]]; then
  echo "warning: runs/slurm has job arrays, and without squeue this machine cannot tell which are still at work." >&2
fi
# A job first leaves a file NAME.pid-HOST-PID and then looks for others': two calls of this script never train the same
# run, nor does a call train what another left running when it was killed.
claimed() { # NAME [own file]: has somebody the run? If so, sets $who
  local file pid
  for file in "runs/$1.pid-"*; do
    pid=${file##*-}
    if [[ ! -e $file || $file == "${2-}" ]]; then
      continue
    elif [[ $file != "runs/$1.pid-$HOSTNAME-$pid" ]]; then
      who="another machine runs it, says $file (if not, delete that)" && return
    elif kill -0 "$pid" 2>/dev/null && [[ ! -d /proc/$pid || /proc/$pid/cwd -ef . ]]; then # not a number used again
      who="process $pid runs it" && return
    fi
    rm -f "$file" # of a process that was killed
  done
  return 1
}
finished() { [[ -f runs/$1/finished && $(<"runs/$1/finished") == "$2" ]]; } # NAME STEPS
progress() { # NAME: sets $progress to the steps that its log last told of
  progress=0
  [[ -f runs/$1/checkpoint.pt && -f runs/$1.log ]] || return
  [[ $(tail -c 500 "runs/$1.log" | tr '\r' '\n') =~ .*\ ([0-9]+)/[0-9]+\ \[ ]] && progress=${BASH_REMATCH[1]}
}

names=() commands=() algo_of=() steps_of=() at=() # of each run to start; at: the steps that it has made
total=0 done=0 all=" "
((SLURM)) && python=$(realpath -s "$python") || python=$PYTHON # a cluster's node may have another PATH
for seed in "${seeds[@]}"; do # outermost, so that half a grid has all algorithms and tasks
  for env in "${envs[@]}"; do
    for algo in "${algos[@]}"; do
      # The paper trains 10M steps on-policy. Off-policy it gives no number, but calls 3M the standard on Ant and
      # Humanoid (Section 5.4); 1M is the field's habit elsewhere.
      preset=loaded-gae steps=10000000
      [[ " $off_policy " == *" $algo "* ]] && preset=loaded steps=1000000
      [[ $preset == loaded && $env =~ ^(Ant|Humanoid)- ]] && steps=3000000
      preset=${PRESET:-$preset} steps=${STEPS:-$steps}
      name=${env//[^A-Za-z0-9._-]/-}__${algo}__${preset}__${steps}__$seed${slug:+__$slug}
      [[ $all == *" $name "* ]] && continue # asked for twice
      all+="$name " total=$((total + 1))
      words=("$python" "$here$algo.py" --env-id "$env" --seed "$seed" --preset "$preset" --total-timesteps "$steps"
        --run-name "$name" --resume --wandb-mode "$WANDB_MODE" --wandb-project "${WANDB_PROJECT:-mdpo}")
      [[ $algo == trpo ]] || words+=(--compile) # measured: pays for all others
      [[ $slug ]] && words+=(--wandb-group "${algo}__${preset}__${env}__$slug" "${extra[@]}") # not mixed with the plain
      if finished "$name" "$steps"; then
        done=$((done + 1))
        ((!DRY_RUN)) || echo "# finished: $name"
      elif who=${queued[$name]-} && [[ $who ]] || claimed "$name"; then
        elsewhere[$name]=$who
        echo "not started: $name: ${elsewhere[$name]}" >&2
      else
        printf -v command ' %q' "${words[@]}"
        names+=("$name") commands+=("OMP_NUM_THREADS=1$command") algo_of+=("$algo") steps_of+=("$steps")
        progress "$name"
        at+=("$progress")
      fi
    done
  done
done
if ((${#names[@]} == 0)); then
  echo "# nothing to start: $done of $total runs are finished"
  ((done == total))
  exit
fi

((DRY_RUN)) || { mkdir -p runs && [[ -w runs ]]; } || refuse "cannot write to the folder runs here."

# ------------------------------------------------------------------------------------------------------------- SLURM
batch_script() {
  printf '#!/usr/bin/env bash\n'
  printf '#SBATCH %s\n' "${options[@]}"
  cat <<'END'
mapfile -t -s "$SLURM_ARRAY_TASK_ID" -n 1 run <"runs/slurm/$SLURM_JOB_NAME"
[[ ${run[0]-} =~ --run-name\ ([^ ]+) ]] || exit 1
name=${BASH_REMATCH[1]} start=$(mktemp)
exec >>"runs/$name.log" 2>&1
printf '\n=== %s, job %s, restart %s: %s\n' "$(date)" "$SLURM_JOB_ID" "${SLURM_RESTART_COUNT:-0}" "${run[0]}"
set -m # else a process in the background ignores SIGINT
eval "exec env ${run[0]}" &
python=$! told='' requeue=''
# Training stops at a checkpoint on the first SIGINT or SIGTERM, and a second of the same kind kills it. SLURM's SIGTERM
# (preemption, scancel) goes to every process of the job, so what is passed on is SIGINT, and only once.
# shellcheck disable=SC2317 # the traps reach it
tell() { [[ $told ]] || kill -INT "$python"; told=1; }
trap 'requeue=1; tell' USR1 # near the time limit
trap 'requeue=; tell' TERM  # SLURM itself requeues what it preempts, and what is cancelled must not come back
while kill -0 "$python" 2>/dev/null; do wait "$python"; done # a trap ends a wait early
wait "$python"
status=$?
# Not what is finished or has failed, nor what would come back for ever, as the time does not reach a checkpoint.
[[ $requeue && $status -ge 128 && runs/$name/checkpoint.pt -nt $start ]] && scontrol requeue "$SLURM_JOB_ID"
rm "$start"
exit "$status"
END
}
if ((SLURM)); then
  array=mdpo-$(date +%Y%m%d-%H%M%S)-$$
  options=(--job-name="$array" --array="0-$((${#names[@]} - 1))${WORKERS:+%$WORKERS}" --ntasks=1 --cpus-per-task=1
    --mem="${MEM:-4G}" ${TIME:+--time="$TIME"} ${PARTITION:+--partition="$PARTITION"} ${GPUS:+--gres=gpu:"$GPUS"}
    --requeue --signal=B:USR1@120 --open-mode=append --output="runs/slurm/%x_%a.log")
  ((!DRY_RUN)) || { printf '# %s\n' "${commands[@]}" && batch_script && exit; }
  command -v sbatch >/dev/null || refuse "there is no sbatch here: SLURM=1 is for a cluster's login node."
  while read -r key _ limit; do
    [[ $key != MaxArraySize ]] || ((${#names[@]} <= limit)) ||
      refuse "${#names[@]} runs are more than this cluster's MaxArraySize, $limit: submit a part, such as SEEDS=1."
  done < <(scontrol show config)
  mkdir -p runs/slurm
  printf '%s\n' "${commands[@]}" >"runs/slurm/$array"
  batch_script >"runs/slurm/$array.sh"
  # Once more as arguments: SBATCH_* variables win over the lines in a script, but not over these.
  job=$(sbatch --parsable "${options[@]}" "runs/slurm/$array.sh") || { rm "runs/slurm/$array"*; refuse "sbatch refused the job."; }
  echo "Submitted ${#names[@]} runs as job array $job, $done of $total are finished. See: squeue --me; tail runs/*.log"
  exit
fi

# ------------------------------------------------------------------------------------------------------ this machine
((!DRY_RUN)) || { printf '%s\n' "${commands[@]}" && exit; }
workers=${WORKERS:-$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)}
pids=() failed=() told=() ended=() seen=()  # by the index of a run; seen: when its progress was
declare -A made=([all]=0) spent=([all]=0) # steps and seconds of an algorithm in this call
next=0 stop=0 stopped_at=0 kill_now=0 shown='' shown_at=0
[[ -t 1 ]] && tty=1 || tty=0

on_signal() { # NUMBER: the loop below passes it on, so that each job gets it once
  ((stop)) || stop=$1 stopped_at=$SECONDS
  ((SECONDS <= stopped_at + 1)) || kill_now=1 # at once is not a second time: `timeout` sends its signal twice
}
trap 'on_signal 1' HUP
trap 'on_signal 2' INT
trap 'on_signal 15' TERM
trap : PIPE # Ctrl-C also ends a `tee` behind this script, which must not leave its jobs for that

launch() { # INDEX
  local name=${names[$1]} claim
  set -m # a process group of its own: a terminal's Ctrl-C comes to this script alone
  (
    claim=runs/$name.pid-$HOSTNAME-$BASHPID
    : >"$claim"
    claimed "$name" "$claim" && echo "$who" && exit 75
    finished "$name" "${steps_of[$1]}" && exit # by another call since this one looked
    printf '\n=== %s: %s\n' "$(date)" "${commands[$1]}"
    eval "exec env ${commands[$1]}"
  ) </dev/null >>"runs/$name.log" 2>&1 &
  pids[$1]=$! seen[$1]=$SECONDS
  set +m
}
reap() { # INDEX STATUS
  local name=${names[$1]}
  rm -f "runs/$name.pid-$HOSTNAME-${pids[$1]}"
  unset "pids[$1]"
  ended[$1]=1
  if finished "$name" "${steps_of[$1]}"; then
    done=$((done + 1))
    account "$1" "${steps_of[$1]}"
  elif (($2 == 75)); then
    elsewhere[$name]=$(tail -n 1 "runs/$name.log")
    echo "not started: $name: ${elsewhere[$name]}" >&2
  elif ((!stop || $2 < 128)); then
    failed[$1]=$2
  fi
}
account() { # INDEX STEPS: it has made so many steps by now
  local algo
  (($2 > at[$1])) || return
  for algo in "${algo_of[$1]}" all; do
    made[$algo]=$((${made[$algo]-0} + $2 - at[$1])) spent[$algo]=$((${spent[$algo]-0} + SECONDS - ${seen[$1]}))
  done
  at[$1]=$2 seen[$1]=$SECONDS
}
time_left() { # from the time a step of the same algorithm has taken in this call, or any step if it has not run yet
  local i algo left=0 waiting=0
  for i in "${!pids[@]}"; do
    progress "${names[$i]}"
    account "$i" "$progress"
  done
  for i in "${!names[@]}"; do
    [[ ${ended[$i]-} ]] && continue
    algo=${algo_of[$i]}
    [[ ${made[$algo]-} ]] || algo=all
    waiting=$((waiting + 1)) left=$((left + (steps_of[i] - at[i]) * ${spent[$algo]} / (${made[$algo]} + 1)))
  done
  left=$((left / (waiting < workers ? waiting : workers) / 60 + 1))
  ((made[all])) && time="about $((left / 60)) h $((left % 60)) min left" || time="time left not known yet"
}
show() { # one line: rewritten on a terminal, else printed when there is news and every ten minutes
  local time counts="$done done, ${#pids[@]} running, ${#failed[@]} failed"
  counts+=", $((total - done - ${#pids[@]} - ${#failed[@]} - ${#elsewhere[@]})) to go"
  ((stop)) && counts+=", stopping at checkpoints"
  [[ $counts != "$shown" ]] || ((SECONDS >= shown_at + (tty ? 10 : 600))) || return
  shown=$counts shown_at=$SECONDS
  time_left
  ((tty)) && printf '\r\e[K%s' "$counts, $time" || echo "$counts, $time" 2>/dev/null
}

while :; do
  for i in "${!pids[@]}"; do
    kill -0 "${pids[$i]}" 2>/dev/null && continue
    wait "${pids[$i]}" 2>/dev/null
    reap "$i" $?
  done
  while ((!stop && ${#pids[@]} < workers && next < ${#names[@]})); do
    launch "$next"
    next=$((next + 1))
  done
  if ((stop)); then
    for i in "${!pids[@]}"; do
      ((!kill_now)) || kill -KILL -- "-${pids[$i]}" 2>/dev/null
      [[ ${told[$i]-} ]] || kill -TERM "${pids[$i]}" 2>/dev/null
      told[i]=1
    done
  fi
  ((${#pids[@]})) || break
  show
  sleep 1 & # in front, it would keep a SIGINT that is sent to this script alone from it
  wait $!
done

((!tty)) || printf '\r\e[K'
for i in "${!failed[@]}"; do
  echo "failed: ${names[$i]}, exit status ${failed[$i]}; the end of runs/${names[$i]}.log:"
  tail -c 2000 "runs/${names[$i]}.log" | tr '\r' '\n' | tail -n 12 | while IFS= read -r line; do echo "    $line"; done
done >&2
echo "$done of $total runs are finished."
((!stop)) || { echo "Stopped; the same command goes on from the checkpoints." >&2; exit $((128 + stop)); }
((done == total))
