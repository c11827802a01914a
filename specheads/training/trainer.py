"""Trains a head: a `transformers.Trainer` whose model is the head in training.

Only the head's weights are trained and saved. The loss of an optimiser's step is the sum of the losses of all its trained
tokens, over all accumulated batches and all processes, divided by their number: padding, the size of batches and the number of
processes do not change it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub import HfApi
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, Subset
from tqdm import tqdm
from transformers import ProgressCallback, Trainer
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import EvalLoopOutput, HubStrategy, rotate_checkpoints

from ..adapters import WEIGHTS as ADAPTER_WEIGHTS
from ..adapters import save_adapter, set_adapter_weights
from ..evaluation.prompts import InputError
from ..heads import DraftHead
from ..heads.saving import write_json, written_together
from .arguments import HeadTrainingArguments
from .batch import TrainingBatch, count_trained
from .checkpoints import RUN, WRITING, clear_unfinished, explained
from .corpus import lengths_of
from .evaluating import Measured, measure
from .medusa2 import AdaptedTeacher, JointTraining
from .metrics import TrainingSums
from .muon import MuonWithAdamW
from .order import LengthGrouped
from .progress import Progress, ShortLines
from .step import DraftTraining

HEAD = "drafts.head."  # what the head's weights are called in the trained module


class TrainedModule(nn.Module):
    """What is wrapped for several processes: tensors in, tensors out.

    Args:
        drafts: The head in training.
    """

    def __init__(self, drafts: DraftTraining):
        super().__init__()
        self.drafts = drafts

    def forward(self, **batch: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of the losses of a batch, and what training reports `[5, K]`."""
        output = self.drafts(TrainingBatch(**batch))
        return output.loss_sum, output.sums.values


class HeadTrainer(Trainer):
    """Trains a head.

    Args:
        drafts: The head in training.
        args: How.
        train_dataset: Of `training_dataset`.
        collator: Makes batches of its examples.
        eval_dataset: Texts that the target wrote, to evaluate on.
        eval_collator: Makes batches of those; `collator` if not given.
        prompts: Prompts that each evaluation has `generate` answer.
        callbacks: Of `transformers`.

    Attributes:
        measured: What the last evaluation found.
        run: What checkpoints say of the run, for those who resume (`check_same_run`).
        beside: `training` and `results`, which are saved beside the head and shown by its card.
    """

    loss_is_scaled_for_ga = True
    args: HeadTrainingArguments

    def __init__(
        self,
        drafts: DraftTraining,
        args: HeadTrainingArguments,
        train_dataset: Any,
        collator: Callable[[Sequence[Mapping[str, Any]]], dict[str, Tensor]],
        eval_dataset: Any = None,
        eval_collator: Callable[[Sequence[Mapping[str, Any]]], dict[str, Tensor]] | None = None,
        prompts: Sequence[Sequence[int]] = (),
        callbacks: list[Any] | None = None,
    ):
        if args.n_gpu > 1:
            args._n_gpu = 1  # several are for several processes
        self.drafts = drafts
        self.prompts: Sequence[Sequence[int]] = prompts
        self.progress, self.eval_collator = Progress(args.depth), eval_collator or collator
        super().__init__(
            model=TrainedModule(drafts),
            args=args,
            data_collator=collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            callbacks=[self.progress, *(callbacks or [])],
        )
        if self.pop_callback(ProgressCallback) is not None:  # there is none if bars are not wanted
            self.add_callback(ShortLines())
        if self._is_sharded and isinstance(drafts, JointTraining):
            raise InputError("Heads with an adapter of their target are small enough for every process; train without FSDP.")
        if args.muon_learning_rate is not None and (self._is_sharded or isinstance(drafts, JointTraining)):
            raise InputError(
                "Muon trains whole matrices of a head alone: leave out `muon_learning_rate`, or train without "
                f"{'FSDP or DeepSpeed' if self._is_sharded else 'an adapter'}."
            )
        self.measured: Measured | None = None
        self.beside: dict[str, Any] = {}
        self.run: dict[str, Any] = {}
        clear_unfinished(Path(args.output_dir))

    @property
    def head(self) -> DraftHead:
        """The head."""
        return self.drafts.head

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """A batch's share of the loss of its optimiser's step."""
        if isinstance(self.drafts.teacher, AdaptedTeacher):
            self.drafts.teacher.is_adapting = self.state.global_step >= self.args.heads_alone * self.state.max_steps
        loss_sum, sums = model(**inputs)
        self.progress.sums.values += sums.cpu()
        count = count_trained(TrainingBatch(**inputs)) if num_items_in_batch is None else num_items_in_batch
        # Gradients are averaged over the processes.
        processes = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
        loss = loss_sum * processes / max(1, int(count))
        return (loss, {}) if return_outputs else loss

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Tensor | None:
        if not batch_samples:
            return None
        count = torch.stack([count_trained(TrainingBatch(**batch)) for batch in batch_samples]).sum().to(device)
        if self.args.world_size > 1 and self.args.average_tokens_across_devices:
            count = self.accelerator.gather(count[None]).sum()
        return count

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int] | None:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        if self.args.train_sampling_strategy != "group_by_length" or not hasattr(dataset, "__len__"):
            return super()._get_train_sampler(dataset)
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        return LengthGrouped(lengths_of(dataset), self._train_batch_size, seed)

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """The optimiser; an adapter has its own learning rate, and so have the matrices that Muon trains."""
        if getattr(self, "optimizer", None) is None:
            kind, settings = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            if isinstance(self.drafts, JointTraining):
                adapter = {"params": list(self.drafts.adapter), "lr": self.args.lora_learning_rate}
                heads = [weight for weight in self.head.parameters() if weight.requires_grad]
                self.optimizer = kind([{"params": heads}, adapter], **settings)
            elif self.args.muon_learning_rate is not None:
                self.optimizer = MuonWithAdamW(self.head, self.args.muon_learning_rate, self.args.weight_decay, settings)
        return super().create_optimizer(model)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds to the reports of training what its steps found: acceptance by position, speed, the time that is left."""
        if "loss" in logs:
            found = self.progress.sums.values.to(self.args.device, torch.float)
            sums = TrainingSums(self.accelerator.reduce(found, reduction="sum").cpu().double())
            logs |= self.progress.report(sums, self.state)
        super().log(logs, start_time)

    # ---- evaluation ----

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """This process's share of the examples, each of them once over all processes."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = self.eval_dataset[dataset]
        if dataset is None:
            raise ValueError("Evaluation needs data: name an `eval_dataset_name` or a number of `eval_examples`.")
        if not hasattr(dataset, "__len__"):
            return DataLoader(dataset, self.args.eval_batch_size, collate_fn=self.eval_collator)
        own = Subset(dataset, range(self.args.process_index, len(dataset), self.args.world_size))
        return DataLoader(own, self.args.eval_batch_size, collate_fn=self.eval_collator)

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Works out what drafts would be worth on texts of the target's, and has it generate some."""
        began = time.perf_counter()
        devices = [self.args.device] if self.args.device.type == "cuda" else []
        # Random numbers go on as if there had been no evaluation; a data loader draws some too.
        with self._whole_head() as drafts, torch.random.fork_rng(devices):
            is_shown = {"disable": self.args.disable_tqdm or not self.is_local_process_zero(), "leave": False}
            shown = tqdm(dataloader, desc="evaluating", **is_shown)
            batches = (TrainingBatch(**self._prepare_inputs(batch)) for batch in shown)
            own = self.prompts[self.args.process_index :: self.args.world_size]
            prompts = tqdm(own, desc="generating", **is_shown) if own else own
            self.measured = measure(drafts, batches, prompts, self.args.deployment, self.args.generate_tokens, self.args.seed)
        self.progress.leave_out(time.perf_counter() - began)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in self.measured.figures().items()}
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=metrics, num_samples=self.measured.examples)

    @contextmanager
    def _whole_head(self) -> Iterator[DraftTraining]:
        """The head in one piece, as it is drafted with, however it is spread over processes."""
        was_training, drafts = self.drafts.training, self.drafts
        if self._is_sharded:
            weights = [self._head_weights()]
            torch.distributed.broadcast_object_list(weights)
            drafts = DraftTraining(self._in_one_piece(weights[0]), drafts.teacher, drafts.settings)
        drafts.eval()
        try:
            yield drafts
        finally:
            drafts.train(was_training)

    @property
    def _is_sharded(self) -> bool:
        return bool(self.is_fsdp_enabled or self.is_deepspeed_enabled)

    def _in_one_piece(self, weights: dict[str, Tensor]) -> DraftHead:
        """The head itself, or a copy with these weights where its own are spread over processes."""
        if not self._is_sharded:
            return self.head
        head = type(self.head).fresh(self.head.config, torch.float, self.args.device)
        head.load_state_dict(weights)
        return head

    # ---- saving and loading ----

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the head, in one piece, as `from_pretrained` and `specheads.enable` read it."""
        folder = Path(output_dir or self.args.output_dir)
        weights = self._head_weights()
        if self.args.should_save:
            with explained(Path(self.args.output_dir)):
                self._in_one_piece(weights).save_pretrained(folder, **self.beside)
                if self.head.config.target_adapter:
                    with written_together(folder) as temporary:
                        save_adapter(self.drafts.teacher.target, temporary)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub()

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **others: Any,
    ) -> Any:
        """Pushes the head with its card, in one commit; a call for all processes.

        Args:
            commit_message: That of the commit.
            blocking: Of no use: a head is small, and the call returns when it is there.
            token: For the Hub; `hub_token` if not given.
            revision: The branch; `hub_revision` if not given.
            private: Whether the repository is, if it is made.
            others: Further arguments of `DraftHead.push_to_hub`.

        Returns:
            What the Hub says of the commit; `None` in all processes but one.
        """
        weights = self._head_weights()
        if not self.is_world_process_zero():
            return None
        name = self.hub_model_id or self.args.hub_model_id or Path(self.args.output_dir).absolute().name
        pushed = self._in_one_piece(weights).push_to_hub(
            name,
            commit_message=commit_message,
            token=token or self.args.hub_token,
            revision=revision or self.args.hub_revision,
            private=self.args.hub_private_repo if private is None else private,
            **{**self.beside, **others},
        )
        if self.head.config.target_adapter:
            self._push_adapter(name, token, revision)
        return pushed

    def _push_adapter(self, name: str, token: str | None, revision: str | None) -> None:
        with TemporaryDirectory() as folder:
            save_adapter(self.drafts.teacher.target, Path(folder))
            HfApi(library_name="specheads", token=token or self.args.hub_token).upload_folder(
                repo_id=name,
                folder_path=folder,
                commit_message="The adapter of its target",
                revision=revision or self.args.hub_revision,
            )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Pushes what `hub_strategy` asks for when a checkpoint was written."""
        strategy = HubStrategy(self.args.hub_strategy)
        if strategy == HubStrategy.END:
            return
        message = f"Training in progress, step {self.state.global_step}"
        self.push_to_hub(message)
        if strategy == HubStrategy.EVERY_SAVE or not self.is_world_process_zero():
            return
        folder = Path(checkpoint_folder)
        HfApi(library_name="specheads", token=self.args.hub_token).upload_folder(
            repo_id=str(self.hub_model_id),
            folder_path=folder,
            path_in_repo="last-checkpoint" if strategy == HubStrategy.CHECKPOINT else folder.name,
            commit_message=f"{message}, checkpoint",
            revision=self.args.hub_revision,
        )

    def _head_weights(self) -> dict[str, Tensor]:
        """All of the head's weights, on the main process at least; a call for all of them."""
        weights = self.accelerator.get_state_dict(self.model_wrapped) or {}
        return {name.removeprefix(HEAD): weight for name, weight in weights.items()}

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Writes a checkpoint aside and moves it to its place when it is whole; only then are older ones deleted."""
        run = Path(self.args.output_dir)
        name = f"checkpoint-{self.state.global_step}"
        aside, place = run / f"{WRITING}{name}", run / name
        self.store_flos()
        best = run / f"checkpoint-{self.state.best_global_step}"
        if self.state.best_global_step and (best == place or best.is_dir()):
            self.state.best_model_checkpoint = str(best)
        try:
            with explained(run):
                self._write_checkpoint(aside)
                self.accelerator.wait_for_everyone()
                if self.args.should_save:
                    shutil.rmtree(place, ignore_errors=True)
                    aside.rename(place)
        except OSError:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(place))
        if self.args.should_save:
            rotate_checkpoints(str(run), self.args.save_total_limit, self.state.best_model_checkpoint, use_mtime=True)

    def _write_checkpoint(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.save_model(str(folder), _internal_call=True)
        if not self.args.save_only_model:
            self._save_optimizer_and_scheduler(str(folder))
            self._save_scaler(str(folder))
            self._save_rng_state(str(folder))
        if self.args.should_save:
            for callback in [*self.callback_handler.callbacks, self.control]:
                if isinstance(callback, ExportableState):
                    self.state.stateful_callbacks[type(callback).__name__] = callback.state()
            write_json(folder / RUN, self.run)
            self.state.save_to_json(str(folder / "trainer_state.json"))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self.is_fsdp_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            self._load_head(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            super()._load_best_model()
        elif self.state.best_model_checkpoint is not None:
            self._load_head(self.state.best_model_checkpoint)

    def _load_head(self, folder: str) -> None:
        """Loads a checkpoint's head, all weights or none.

        Raises:
            ValueError: if it is another kind of head, or knows other tokens.
        """
        saved = type(self.head).from_pretrained(folder)
        theirs, ours = saved.draft_ids, self.head.draft_ids
        if (theirs is None) != (ours is None) or (theirs is not None and not torch.equal(theirs, ours.to(theirs))):
            raise ValueError(
                f"The head in {folder} knows other tokens than this run's, whose data or `draft_vocab_size` must have changed; "
                "resume with those that it began with."
            )
        self.head.load_state_dict(saved.state_dict())
        if self.head.config.target_adapter:
            set_adapter_weights(self.drafts.teacher.target, load_file(Path(folder) / ADAPTER_WEIGHTS))
